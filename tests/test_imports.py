"""`import mgk` needs torch alone; the package's own imports go one way."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mgk
from mgk import cli

PACKAGE = Path(mgk.__file__).parent
OPTIONAL = [
    "triton",
    "transformers",
    "lightning",
    "pytorch_lightning",
    "typer",
    "rich",
    "yaml",
    "matplotlib",
    "tensorboard",
]


def run(code, *args):
    """What a fresh interpreter prints, errors and warnings included."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.strip()


BLOCKED = """
import sys
for name in sys.argv[1:]:
    sys.modules[name] = None  # importing it raises ModuleNotFoundError
import torch, mgk
x = torch.randn(2, 9, 12, requires_grad=True)
for variant in mgk.VARIANTS:
    layer = mgk.Attention(12, 4, variant=variant, is_causal=True)
    layer(x).sum().backward()
    with torch.no_grad():
        layer.eval()(x, cache=layer.make_cache(2, 9))
mgk.MultiheadAttention(12, 4, batch_first=True)(x, x, x)
"""


@pytest.mark.slow
def test_it_works_without_the_optional_packages():
    """... and says nothing about them."""
    assert run(BLOCKED, *OPTIONAL) == ""


def test_the_extra_is_what_pyproject_installs():
    lines = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith("train = "))
    names = {name.lower().replace("-", "_").replace("pyyaml", "yaml") for name in re.findall(r'"([^"]+)"', line)}
    assert names == set(cli.EXTRA)


WITHOUT = """
import sys
missing, *sys.argv[1:] = sys.argv[1:]
sys.modules[missing] = None
from mgk import cli
try:
    cli.main()
except SystemExit as end:
    print("exit", end.code)
"""


@pytest.mark.parametrize("missing", ["typer", "pytorch_lightning", "yaml"])
def test_a_command_asks_for_what_it_needs(missing, tmp_path):
    """Also what is only found missing while it works."""
    said = run(WITHOUT, missing, "train", "demo", "--out", str(tmp_path / "run"), "--data-dir", str(tmp_path))
    assert said.endswith("exit 2"), said
    assert f"extra 'train' ({missing} is missing): pip install" in said


OLD_TRITON = """
import sys
sys.path.insert(0, sys.argv[1])
from mgk.kernels import fused, fused_linear
print(fused.refuses(None), fused_linear.refuses(None), sep="\\n")
"""


def test_an_old_triton_is_refused(tmp_path):
    """The kernels import what came with 3.4; torch before 2.8 brings an older one."""
    (tmp_path / "triton" / "tools").mkdir(parents=True)
    (tmp_path / "triton" / "__init__.py").write_text("raise ImportError('looked at, not imported')")
    assert [line.split(",")[0] for line in run(OLD_TRITON, str(tmp_path)).splitlines()] == [
        "the kernels need Triton 3.4 or newer"
    ] * 2
    (tmp_path / "triton" / "tools" / "tensor_descriptor.py").touch()
    looked = "from mgk.kernels import fused; print(fused.NO_TRITON)"
    assert run(f"import sys; sys.path.insert(0, sys.argv[1]); {looked}", str(tmp_path)) == "None"


def test_it_does_not_import_the_optional_packages():
    code = "import sys, torch; before = set(sys.modules); import mgk; print(*sorted(set(sys.modules) - before))"
    added = {name.split(".")[0] for name in run(code).split()}
    assert not added & {*OPTIONAL, "numpy", "safetensors", "onnx", "onnxruntime"}


# Where each file stands in "tokens -> models -> attention -> functional -> kernels -> equations", from the bottom: it
# imports what stands lower, or at its own height. What is not listed stands with the models, above the public names.
HEIGHT = {
    "checks": 0,
    "files": 0,
    "equations": 0,
    "features": 0,
    "rotary": 0,
    "recomputation": 0,
    "arguments": 1,
    "kernels": 2,
    "functional": 3,
    "variants": 4,
    "cache": 4,
    "how": 5,
    "keys": 5,
    "priors": 5,
    "conversion": 5,
    "attention": 6,
    "multihead": 7,
    "__init__": 8,
    "analysis": 10,
    "training": 11,
    "evaluation": 11,
    "cost": 11,
    "evidence": 11,
    "hf": 11,
    "commands": 12,
    "cli": 12,
    "__main__": 13,
}
MODELS = 9
# What these import: torch, and those that are modules the checks of their arguments.
TORCH_ALONE = {
    "equations": {"torch"},
    "features": {"torch", "mgk._core.validation"},
    "rotary": {"torch", "mgk._core.validation"},
}
# transformers: our models in its shells, and its models under analysis.
ONLY_THERE = {"transformers": ("hf/", "analysis/foreign.py"), "triton": ("kernels/",)}
FILES = sorted(PACKAGE.rglob("*.py"))


def part(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


PARTS = {part(path) for path in FILES}


def imported(path):
    """The full names of all modules that a file imports anywhere, `mgk.backends.eager` for one of ours."""
    package = ["mgk", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*origin, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    own = part(path)
    for name in imported(path):
        top, *rest = name.split(".")
        if top == "mgk":
            other = rest[0] if rest and rest[0] in PARTS else "__init__"
            assert HEIGHT.get(other, MODELS) <= HEIGHT.get(own, MODELS), f"{own} imports {name}, which stands above it"
        where = path.relative_to(PACKAGE).as_posix()
        assert where.startswith(ONLY_THERE.get(top, "")), f"{where} imports {top}"


@pytest.mark.parametrize(("name", "allowed"), TORCH_ALONE.items(), ids=TORCH_ALONE)
def test_the_paper_imports_torch_alone(name, allowed):
    modules = [module.split(".") for module in imported(PACKAGE / f"{name}.py")]
    others = {".".join(parts[: 2 if parts[0] == "mgk" else 1]) for parts in modules}
    assert others - set(sys.stdlib_module_names) == allowed


def test_the_files_of_equal_height_form_no_circle():
    graph = {}
    for path in FILES:
        name = path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")
        graph[name] = {
            other
            for module in imported(path)
            for other in (module.removeprefix("mgk."), module.removeprefix("mgk.").rpartition(".")[0])
            if module.startswith("mgk.") and (PACKAGE / f"{other.replace('.', '/')}.py").exists()
        }
    done = set()
    while left := set(graph) - done:
        free = {name for name in left if graph[name] <= done}
        assert free, f"these import one another: {sorted(left)}"
        done |= free


def test_public_names():
    assert sorted(mgk.__all__) == sorted(set(mgk.__all__))
    assert all(hasattr(mgk, name) for name in mgk.__all__)
    promised = (
        "mgk_attention smgk_attention mlk_attention smlk_attention explain_backend Attention MultiheadAttention Cache"
    )
    assert {*promised.split(), "Variant", "VARIANTS", "PRESETS"} <= set(mgk.__all__)
