"""Shared fixtures: references and data that live beside the repository, and a fixed seed."""

import ast
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import jumbo_core  # noqa: F401 (registers the models with timm)

SHARED = Path(os.environ.get("JUMBO_SHARED", Path(__file__).resolve().parents[2] / "shared"))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of golden files and data; tests that need it skip where it is absent."""
    if not (SHARED / "golden").is_dir():
        pytest.skip(f"needs the shared folder with golden/ and data/ (looked at {SHARED}; set JUMBO_SHARED)")
    return SHARED


class Golden:
    """A golden file: ``path``, ``arguments`` of the model's constructor, recorded tensors by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with safe_open(path, "pt") as file:
            self.arguments = {key: ast.literal_eval(value) for key, value in file.metadata().items()}
            self.tensors = {key: file.get_tensor(key) for key in file.keys() if not key.startswith("weight.")}
            self.weights = {
                key.removeprefix("weight."): file.get_tensor(key) for key in file.keys() if key.startswith("weight.")
            }
        if "J" in self.arguments:
            self.arguments["multiplier"] = self.arguments.pop("J")

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    @property
    def blocks(self) -> list[torch.Tensor]:
        return [self.tensors[f"block.{i}"] for i in range(self.arguments["depth"])]


@pytest.fixture(scope="session", params=["jumbo_small_square", "jumbo_rect_j3"])
def golden(request, shared) -> Golden:
    """Each released-Jumbo reference in turn."""
    return Golden(shared / "golden" / f"{request.param}.safetensors")


def max_error(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    return (a - b).abs().max().item()
