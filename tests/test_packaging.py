"""The wheel: what it carries, and that it works without any host. The real fresh environment is `make wheel-check`."""

import os
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HIDE_HOSTS = """
import sys, runpy

HOSTS = {"transformers", "mmengine", "mmseg", "mmcv", "tsai", "fastai", "fastcore", "accelerate", "neuralforecast"}

class WithoutHosts:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HOSTS else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [WithoutHosts(finder) for finder in sys.meta_path]
sys.path.insert(0, sys.argv[1])
script = sys.argv[2]
sys.argv = [script, "--target"]
runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        check=True, capture_output=True,
    )  # fmt: skip
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_carries_packages_configs_and_markers_once(wheel):
    names = Counter(zipfile.ZipFile(wheel).namelist())
    assert max(names.values()) == 1
    assert wheel.name.startswith("jumbo_vit-") and wheel.name.endswith("py3-none-any.whl")
    for wanted in ("jumbo_core/py.typed", "hf_ext/py.typed", "ts_ext/py.typed", "mmseg_ext/py.typed"):
        assert wanted in names
    shipped = {n.removeprefix("mmseg_ext/.mim/") for n in names if n.startswith("mmseg_ext/.mim/")}
    tree = ROOT / "plugins" / "mmseg"
    here = {str(p.relative_to(tree)) for p in tree.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert shipped == here and any(name.startswith("configs/") for name in shipped)
    assert not any(name.split("/")[0] in ("tests", "demo", "benchmarks", "plugins", "docs") for name in names)


def test_wheel_works_without_hosts_and_adapters_name_their_extra(wheel, tmp_path):
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tmp_path / "env", wheel], check=True
    )
    done = subprocess.run(
        [sys.executable, "-c", HIDE_HOSTS, tmp_path / "env", ROOT / "tests" / "wheel_without_extras.py"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "wheel without extras: ok" in done.stdout


RESOLVE = """
import sys
from pathlib import Path
import mmseg_ext
assert ("site-packages" if sys.argv[1] == "wheel" else "mmseg_ext") in mmseg_ext.__file__, mmseg_ext.__file__
assert (Path(mmseg_ext.__file__).parent.parent / "jumbo_core").is_dir()
from mmengine.config import Config
config = Config.fromfile("both.py")
assert config.model.backbone.type == "JumboViT" and config.train_cfg.max_iters == 40000, config
print(mmseg_ext.__file__)
"""


@pytest.mark.parametrize("install", ["wheel", "editable"])
def test_base_configs_resolve_in_wheel_and_editable_installs(install, request, tmp_path):
    pytest.importorskip("mmseg", reason="needs the extra mmseg-lite")
    environment = dict(os.environ)
    if install == "wheel":
        target = tmp_path / "site-packages"
        wheel = request.getfixturevalue("wheel")
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, wheel], check=True
        )
        environment["PYTHONPATH"] = str(target)
    # The shipped config itself is built on mmseg::_base_ files, so that one file exercises both prefixes.
    (tmp_path / "both.py").write_text(
        '_base_ = "mmseg_ext::jumbo/jumbo-tiny_upernet_8xb2-160k_ade20k-512x512.py"\n'
        "train_cfg = dict(max_iters=40000)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RESOLVE, install],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ("site-packages" in done.stdout) == (install == "wheel")


def test_metadata():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "jumbo-vit"
    extras = {"mmseg", "mmseg-lite", "hf", "ts", "nixtla", "diffusion", "all", "dev"}
    assert set(project["optional-dependencies"]) == extras
    assert not any(d.startswith("mmcv") for d in project["optional-dependencies"]["mmseg"])
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_core_imports_no_host():
    """Arrows point down: nothing below jumbo_core knows a host."""
    code = (
        "import sys, jumbo_core, jumbo_core.measure; "
        "hosts = [m for m in ('transformers', 'mmengine', 'mmseg', 'mmcv', 'tsai', 'fastai') if m in sys.modules]; "
        "sys.exit(str(hosts) if hosts else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_repository_names_no_registry_and_no_machine_path():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.split():
        path = ROOT / name
        if name == Path(__file__).relative_to(ROOT).as_posix() or not path.is_file() or path.is_symlink():
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for banned in ("pypi.org", "files.pythonhosted", "index-url", "/work/", "/tmp/", "/root/"):
            assert banned not in text, f"{name} names {banned}"
