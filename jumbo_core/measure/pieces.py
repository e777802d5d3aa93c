"""What the report measures: its tables, each one command of ``python -m jumbo_core.measure``, and their targets."""

from __future__ import annotations

import shlex
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


class Piece(NamedTuple):
    """One table of the report.

    name: of its files. title, text: above the table. words: its command, after ``python -m jumbo_core.measure``.
    quick: words for the short form, in place of options of the same name; None: not in it. targets: results by name ->
    what must hold; results that are missing are missing there too. on_cuda: whether it measures on a GPU as well.
    """

    name: str
    title: str
    text: str
    words: str
    quick: str | None
    targets: Callable[[dict[str, dict]], list[Target]] = lambda results: []
    on_cuda: bool = True

    def command(self, *, quick: bool, threads: int, device: str) -> list[str]:
        """Arguments of the command, as in :func:`jumbo_core.measure.commands.make_parser`."""
        words = override(shlex.split(self.words), shlex.split(self.quick) if quick and self.quick else [])
        words += ["--threads", str(threads)]
        return [*words, "--device", device] if self.on_cuda else words


def override(words: list[str], others: list[str]) -> list[str]:
    """A command with the options of ``others`` in place of its own of the same name."""
    options, key = {}, ""
    for word in [*words, *others]:
        if word.startswith("--"):
            key = word
            options[key] = []
        else:
            options.setdefault(key, []).append(word)
    return [word for key, values in options.items() for word in ([key] if key else []) + values]


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


def registers_piece(size: str, rounds: str) -> Piece:
    jumbo = f"jumbo_{size}_patch16_224"
    return Piece(
        f"registers_{size}",
        f"Jumbo-{size} against a ViT with 16 registers",
        "Equal width, heads and depth; the ViT is timm's own class with a class token and 16 registers. The Jumbo "
        "token stands in place of those 17 tokens. int8 and bf16 are the low-latency forms of the shared FFN.",
        f"speed vit_registers_{size} {jumbo} {jumbo}@int8 {jumbo}@bf16 --batch 1 8 32 --no-memory {rounds}",
        "--processes 3 --seconds 2",
        registers_targets(size),
    )


def parameters_piece(size: str) -> Piece:
    return Piece(
        f"parameters_{size}",
        f"Jumbo-{size} against a ViT widened to its parameters",
        "Width and heads grow, depth stays, 16 registers; a closed form finds the width.",
        f"speed vit_wide_{size} jumbo_{size}_patch16_224 jumbo_{size}_patch16_224@int8 --batch 1 8 --no-memory "
        "--processes 3 --seconds 10",
        "--processes 1 --seconds 5",
        parameters_targets(size),
    )


PIECES = (
    registers_piece("tiny", "--processes 7 --seconds 8"),
    registers_piece("small", "--processes 7 --seconds 12"),
    Piece(
        "accuracy",
        "Equal accuracy on CIFAR-10",
        "The models of benchmarks.cifar: photos of 32x32, patch 4, depth 4.",
        f"speed {CIFAR_REGISTERS} {CIFAR_JUMBO} cifar_jumbo_64 --batch 1 32 128 --image-size 32 --no-memory "
        "--processes 7",
        "--processes 3 --repeats 7",
        accuracy_targets,
    ),
    parameters_piece("tiny"),
    parameters_piece("small"),
    Piece(
        "peers_tiny",
        "Convolutional and hybrid peers near Jumbo-tiny",
        "From timm: the nearest of each family in parameters (EfficientViT-B2, SHViT-S4, "
        "MobileNetV4-hybrid-large-0.75) and, last, nearer in time at batch 8 (EfficientViT-B1, "
        "MobileNetV4-hybrid-medium); all at 224 pixels. Equal parameters or time, not equal accuracy.",
        "speed jumbo_tiny_patch16_224 jumbo_tiny_patch16_224@int8 efficientvit@channels-last shvit@channels-last "
        "mobilenetv4 mobilenetv4@channels-last efficientvit_b1@channels-last mobilenetv4_hybrid_medium "
        "--batch 1 8 --no-memory --seconds 20",
        "--seconds 4",
    ),
    Piece(
        "peers_small",
        "Convolutional and hybrid peers near Jumbo-small",
        "The nearest in parameters of timm's EfficientViT (L2) and MobileNetV4 (hybrid-large, the largest there is); "
        "the largest SHViT has a quarter of the parameters and stands in the table above.",
        "speed jumbo_small_patch16_224 jumbo_small_patch16_224@int8 efficientvit_l@channels-last mobilenetv4_l "
        "mobilenetv4_l@channels-last --batch 1 8 --no-memory --seconds 20",
        "--seconds 4",
    ),
    Piece(
        "compile",
        "torch.compile",
        "Eager against compiled, time to compile not counted.",
        "speed jumbo_tiny_patch16_224 jumbo_tiny_patch16_224@compile jumbo_tiny_patch16_224@int8 "
        "jumbo_tiny_patch16_224@int8+compile vit_registers_tiny vit_registers_tiny@compile --batch 1 8 --no-memory "
        "--seconds 10",
        None,
    ),
    Piece(
        "scan",
        "The scan against Transformers' torch path of Mamba-2",
        "Batch 1, 24 heads of 64 channels, 64 states, fp32.",
        "scan",
        "--repeats 7",
        scan_targets,
    ),
    Piece(
        "block",
        "A linear block against its own matrix products",
        "An AdventurerBlock (norm, mixer, residual, SwiGLU, residual) on 2,048 tokens, fp32.",
        "block",
        "--repeats 7",
        block_targets,
    ),
    Piece(
        "mamba2",
        "Adventurer on our mixer and on Transformers' Mamba-2",
        "adventurer_tiny with its own mixers, and with Transformers' (torch path, same weights, chunk 64).",
        "speed transformers:mamba2 adventurer_tiny_patch16_224 --batch 1 --image-size 512 --seconds 20",
        "--seconds 4 --no-memory",
    ),
    Piece(
        "linear",
        "Jumbo-linear-S in place of a ViT-B, up to 512x1024",
        "timm's vit_base_patch16, its position table made for the size, with fused attention and with scores as a "
        f"tensor, against {JUMBO_LINEAR} (D=512 as Adventurer-S, 12 blocks, J=6) and the same with D=384 as Jumbo-S "
        "and ViT-S, both as trained and after optimize_for_inference (int8); one image, random weights: what is "
        "compared is time, not accuracy.",
        "scaling --preset vit_b --sizes 512 512x1024",
        "--seconds 3",
        linear_targets,
    ),
    Piece(
        "linear_large",
        "Jumbo-linear-S in place of a ViT-B, up to 1024x2048",
        "As above, larger; few rounds, since one of ViT-B takes half a minute.",
        "scaling --preset vit_b --sizes 1024 1024x2048 --repeats 3",
        "--no-memory --seconds 1",
        linear_large_targets,
    ),
    Piece(
        "width256",
        "Models of one width over image sizes",
        "D=256, 12 blocks, patch 16: where linear time begins to pay against fused attention at equal width.",
        "scaling --preset width256 --repeats 3",
        "--sizes 224 512 512x1024 --no-memory --seconds 2",
    ),
    Piece(
        "tofu",
        "Token fusion in a ViT-B/16 at 224 pixels",
        "r = 16 tokens leave in every block.",
        "tofu --batch 8 1",
        "--repeats 3",
        tofu_targets,
        on_cuda=False,
    ),
    Piece(
        "training_jumbo",
        "Training: Jumbo-tiny against the ViT with 16 registers",
        "One step is forward, cross-entropy, backward and AdamW; drop path off in all. Peak memory is that of the "
        "first step beyond the weights: activations, gradients, AdamW's moments.",
        "speed vit_registers_tiny jumbo_tiny_patch16_224 --train --batch 8 32 --seconds 20",
        "--batch 8 --seconds 4",
    ),
    Piece(
        "training_linear",
        "Training: linear models against a ViT of their width",
        "D=256, images of 512x512 (1,024 tokens), a batch of 2.",
        "speed vit_registers_256 adventurer_tiny_patch16_224 jumbo_adventurer_tiny_patch16_224 --train --batch 2 "
        "--image-size 512 --seconds 30",
        "--seconds 4",
    ),
)
