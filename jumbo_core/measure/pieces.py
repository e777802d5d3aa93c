"""What the report measures: its tables, each one command of ``python -m jumbo_core.measure``, with their targets."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import NamedTuple

from jumbo_core.measure import targets
from jumbo_core.measure.targets import CIFAR_JUMBO, CIFAR_REGISTERS, JUMBO_LINEAR, Target


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


def registers_piece(size: str, rounds: str) -> Piece:
    jumbo = f"jumbo_{size}_patch16_224"
    return Piece(
        f"registers_{size}",
        f"Jumbo-{size} against a ViT with 16 registers",
        "Equal width, heads and depth; the ViT is timm's own class with a class token and 16 registers. The Jumbo "
        "token stands in place of those 17 tokens. int8 and bf16 are the low-latency forms of the shared FFN.",
        f"speed vit_registers_{size} {jumbo} {jumbo}@int8 {jumbo}@bf16 --batch 1 8 32 --no-memory {rounds}",
        "--processes 2 --seconds 2",
        targets.registers_targets(size),
    )


def parameters_piece(size: str) -> Piece:
    return Piece(
        f"parameters_{size}",
        f"Jumbo-{size} against a ViT widened to its parameters",
        "Width and heads grow, depth stays, 16 registers; a closed form finds the width.",
        f"speed vit_wide_{size} jumbo_{size}_patch16_224 jumbo_{size}_patch16_224@int8 --batch 1 8 --no-memory "
        "--processes 3 --seconds 10",
        "--processes 1 --seconds 5",
        targets.parameters_targets(size),
    )


def training_piece(name: str, size: str, rounds: str, quick: str | None) -> Piece:
    return Piece(
        name,
        f"Training: Jumbo-{size} against the ViT with 16 registers",
        "One step is forward, cross-entropy, backward and AdamW; drop path off in all. Peak memory is that of the "
        "first step beyond the weights: activations, gradients, AdamW's moments.",
        f"speed vit_registers_{size} jumbo_{size}_patch16_224 --train {rounds}",
        quick,
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
        targets.accuracy_targets,
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
        targets.scan_targets,
    ),
    Piece(
        "block",
        "A linear block against its own matrix products",
        "An AdventurerBlock (norm, mixer, residual, SwiGLU, residual) on 2,048 tokens, fp32.",
        "block",
        "--repeats 7",
        targets.block_targets,
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
        "compared is time, not accuracy. The int8 form's memory has its weights in it as the processor multiplies "
        "them, which the first call makes.",
        "scaling --preset vit_b --sizes 512 512x1024",
        "--no-memory --seconds 3",
        targets.linear_targets,
    ),
    Piece(
        "linear_large",
        "Jumbo-linear-S in place of a ViT-B, up to 1024x2048",
        "As above, larger; few rounds, since one of ViT-B takes half a minute.",
        "scaling --preset vit_b --sizes 1024 1024x2048 --repeats 3",
        None,
        targets.linear_large_targets,
    ),
    Piece(
        "linear_bfloat16",
        "Jumbo-linear-S in place of a ViT-B, in bfloat16",
        "Whole models in bfloat16 at 512x1024, where processors with such products spend less on them and so more on "
        "all that is no product.",
        f"speed {targets.VIT_B} {targets.JUMBO_LINEAR} jumbo_linear_384 jumbo_linear_384@int8 --batch 1 --image-size "
        "512x1024 --dtype bfloat16 --no-memory --repeats 7",
        None,
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
        targets.tofu_targets,
        on_cuda=False,
    ),
    training_piece("training_jumbo", "tiny", "--batch 8 32 --seconds 20", "--batch 8 --seconds 4"),
    training_piece("training_jumbo_small", "small", "--batch 8 --seconds 30", None),
    Piece(
        "training_linear",
        "Training: linear models against a ViT of their width",
        "D=256, images of 512x512 (1,024 tokens), a batch of 2.",
        "speed vit_registers_256 adventurer_tiny_patch16_224 jumbo_adventurer_tiny_patch16_224 --train --batch 2 "
        "--image-size 512 --seconds 30",
        "--seconds 4",
    ),
    Piece(
        "diffusion",
        "Token fusion in Stable Diffusion's UNet, by name",
        "One denoising step of a UNet of SD 1.5's shape with random weights: latents of 64x64, two prompts of 77 "
        "tokens, half of the tokens fused at the finest resolution. Few rounds, for one takes half a "
        "minute on two cores.",
        "speed sd15_unet sd15_unet@tomesd sd15_unet@tofu --batch 2 --image-size 512 --repeats 3 --no-memory",
        None,
    ),
)
