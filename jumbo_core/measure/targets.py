"""What the report must show: figures read from its tables, and whether they are met."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jumbo_core.measure.scaling import exponents
from jumbo_core.measure.turns import paired

CIFAR_JUMBO, CIFAR_REGISTERS = "cifar_jumbo_32", "cifar_registers_64"
JUMBO_LINEAR, VIT_B = "jumbo_adventurer_small_patch16_224", "vit_b"
LINEAR_FORMS = {  # what may be meant by Jumbo-linear-S: Adventurer-S is 512 wide, Jumbo-S and ViT-S 384
    JUMBO_LINEAR: "D=512",
    f"{JUMBO_LINEAR}@int8": "D=512, int8 FFN",
    "jumbo_linear_384": "D=384",
    "jumbo_linear_384@int8": "D=384, int8 FFN",
}


class Target(NamedTuple):
    """A figure that must be at least (or at most) so large; ``measured`` None: this run has no such figure."""

    what: str
    wanted: float
    measured: float | None
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured <= self.wanted if self.at_most else self.measured >= self.wanted

    def cells(self) -> list[str]:
        """What, target, measured, verdict; a missed target says by how much."""
        sign = "at most" if self.at_most else "at least"
        if self.measured is None:
            return [self.what, f"{sign} {self.wanted:g}", "-", "not measured in this run"]
        verdict = "met" if self.met else f"missed by {100 * abs(self.measured / self.wanted - 1):.1f} %"
        return [self.what, f"{sign} {self.wanted:g}", f"{self.measured:.3g}", verdict]


def ratio(result: dict | None, slow: str, fast: str, **where) -> float | None:
    """How many times as fast as ``slow`` ``fast`` is, paired by round, in the rows that have ``where``."""
    rows = {row["model"]: row for row in (result or {}).get("rows", ()) if all(row[k] == v for k, v in where.items())}
    if slow not in rows or fast not in rows:
        return None
    return paired(rows[slow]["rounds_ms"], rows[fast]["rounds_ms"])["median"]


def registers_targets(size: str) -> Callable[[dict], list[Target]]:
    baseline, jumbo = f"vit_registers_{size}", f"jumbo_{size}_patch16_224"

    def targets(results: dict[str, dict]) -> list[Target]:
        found = results.get(f"registers_{size}")
        low_latency = f"Jumbo-{size}, int8 FFN, against the ViT"
        return [
            Target(
                f"Jumbo-{size} as published against the ViT, batch 32", 0.97, ratio(found, baseline, jumbo, batch=32)
            ),
            Target(f"{low_latency}, batch 8", 0.95, ratio(found, baseline, f"{jumbo}@int8", batch=8)),
            Target(f"{low_latency}, batch 1", 0.85, ratio(found, baseline, f"{jumbo}@int8", batch=1)),
        ]

    return targets


def parameters_targets(size: str) -> Callable[[dict], list[Target]]:
    def targets(results: dict[str, dict]) -> list[Target]:
        found = ratio(results.get(f"parameters_{size}"), f"vit_wide_{size}", f"jumbo_{size}_patch16_224", batch=8)
        return [Target(f"Jumbo-{size} against the ViT of its parameters, batch 8 (the paper's figure)", 1.7, found)]

    return targets


def accuracy_targets(results: dict[str, dict]) -> list[Target]:
    found, text = results.get("accuracy"), "Jumbo of width 32 against the ViT of width 64"
    return [  # the paper's figure, of throughput: large batches
        Target(f"{text}, batch {n} (the paper's figure)", 1.9, ratio(found, CIFAR_REGISTERS, CIFAR_JUMBO, batch=n))
        for n in (32, 128)
    ]


def linear_targets(results: dict[str, dict]) -> list[Target]:
    found, size = results.get("linear"), [512, 1024]
    return [
        Target(f"512x1024, {attention} attention, {text}", least, ratio(found, vit, form, size=size))
        for form, text in LINEAR_FORMS.items()
        for attention, vit, least in (("fused", VIT_B, 3.5), ("materialised", f"{VIT_B}@materialised", 5))
    ]


def linear_large_targets(results: dict[str, dict]) -> list[Target]:
    small, large = results.get("linear"), results.get("linear_large")
    rows = [row for found in (small, large) if found for row in found["rows"]]
    slopes, measured = exponents(rows, JUMBO_LINEAR), [row["tokens"] for row in rows if row.get("peak_MiB")]
    over = f", {min(measured):,} to {max(measured):,} tokens" if measured else ""
    return [
        *(
            Target(f"1024x2048, fused attention, {text}", 6, ratio(large, VIT_B, form, size=[1024, 2048]))
            for form, text in LINEAR_FORMS.items()
        ),
        Target("exponent of its time over tokens, all sizes", 1.1, slopes.get("ms"), at_most=True),
        Target(f"exponent of its peak memory over tokens{over}", 1.1, slopes.get("peak_MiB"), at_most=True),
    ]


def scan_targets(results: dict[str, dict]) -> list[Target]:
    found = results.get("scan")
    return [Target("scan against Transformers at its best chunk", 3.5, found and found["ratio"])]


def block_targets(results: dict[str, dict]) -> list[Target]:
    rows = (results.get("block") or {}).get("rows", ())
    found = {row["width"]: row["ratio"] for row in rows}
    text = "time over that of its linear layers' products"
    return [Target(f"{text}, width of {name}", 1.3, found.get(name), at_most=True) for name in ("small", "base")]


def tofu_targets(results: dict[str, dict]) -> list[Target]:
    rows = (results.get("tofu") or {}).get("rows", ())
    kept = {row["batch"]: row["kept_of_the_saving"] for row in rows if row["plan"] == "paper"}
    text = "share of the multiply-adds saved that comes out as time, the paper's plan"
    return [Target(f"{text}, batch {batch}", 0.85, kept.get(batch)) for batch in (1, 8)]
