"""Check that `import mgk` needs torch alone, and that the packages import one another in one direction."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mgk
from mgk import cli

PACKAGE = Path(mgk.__file__).parent
ROOT = Path(__file__).parents[1]
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
    "tokenizers",
    "scipy",
]


def run(code, *args):
    """Return the output of a new interpreter, errors and warnings included."""
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
def test_library_works_without_optional_packages_and_warnings():
    assert run(BLOCKED, *OPTIONAL) == ""


def test_extra_lists_the_packages_of_pyproject():
    lines = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith("train = "))
    names = {name.lower().replace("-", "_").replace("pyyaml", "yaml") for name in re.findall(r'"([^"]+)"', line)}
    assert names == set(cli.TRAIN_PACKAGES)


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
def test_command_without_a_package_names_the_extra(missing, tmp_path):
    """Check packages that are imported at the start of a command, and later."""
    output = run(WITHOUT, missing, "train", "demo", "--out", str(tmp_path / "run"), "--data-dir", str(tmp_path))
    assert output.endswith("exit 2"), output
    assert f"extra 'train' ({missing} is missing): pip install" in output


OLD_TRITON = """
import sys
sys.path.insert(0, sys.argv[1])
from mgk.backends import triton
print(triton.mixture_unsupported_reason(None), triton.linear_unsupported_reason(None), sep="\\n")
"""


def test_old_triton_is_unsupported(tmp_path):
    """The kernels import modules of Triton 3.4; torch before 2.8 installs an older version."""
    (tmp_path / "triton" / "tools").mkdir(parents=True)
    (tmp_path / "triton" / "__init__.py").write_text("raise ImportError('must not be imported')")
    assert [line.split(",")[0] for line in run(OLD_TRITON, str(tmp_path)).splitlines()] == [
        "the kernels require Triton 3.4 or newer"
    ] * 2
    (tmp_path / "triton" / "tools" / "tensor_descriptor.py").touch()
    code = "import sys; sys.path.insert(0, sys.argv[1]); from mgk.backends import triton; print(triton.NO_TRITON)"
    assert run(code, str(tmp_path)) == "None"


def test_optional_packages_are_not_imported():
    code = "import sys, torch; before = set(sys.modules); import mgk; print(*sorted(set(sys.modules) - before))"
    added = {name.split(".")[0] for name in run(code).split()}
    assert not added & {*OPTIONAL, "numpy", "safetensors", "onnx", "onnxruntime"}


CONTRACTS = ("layers", "backends", "triton", "transformers")


@pytest.mark.parametrize("contract", CONTRACTS)
def test_import_contracts(contract):
    """Run import-linter on the contracts of pyproject.toml, one at a time."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()"]
    done = subprocess.run(
        [*command, "--no-cache", "--contract", contract], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "1 kept, 0 broken" in done.stdout


def test_all_import_contracts_are_run():
    contracts = re.findall(r'^id = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(contracts) == set(CONTRACTS)


def test_transformers_integration_loads_no_harness():
    pytest.importorskip("transformers")
    loaded = run("import sys, mgk.hf; print(*sorted(sys.modules))").split()
    harness = ("mgk.tasks", "mgk.training", "mgk.analysis", "mgk.cli", "mgk.bench", "experiments")
    assert not [name for name in loaded if name.startswith(harness)]


def imported(path):
    """Return the full names of all modules that a file imports anywhere."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


# Modules outside the standard library that these files may import.
TORCH_ALONE = {
    "equations": {"torch"},
    "features": {"torch", "mgk._core.validation"},
    "rotary": {"torch", "mgk._core.validation"},
}


@pytest.mark.parametrize(("name", "allowed"), TORCH_ALONE.items(), ids=TORCH_ALONE)
def test_equations_import_torch_alone(name, allowed):
    modules = [module.split(".") for module in imported(PACKAGE / f"{name}.py")]
    packages = {".".join(parts[: 3 if parts[0] == "mgk" else 1]) for parts in modules}
    assert packages - set(sys.stdlib_module_names) == allowed


def test_public_names():
    assert sorted(mgk.__all__) == sorted(set(mgk.__all__))
    assert all(hasattr(mgk, name) for name in mgk.__all__)
    documented = (
        "mgk_attention smgk_attention mlk_attention smlk_attention explain_backend Attention MultiheadAttention Cache"
    )
    assert {*documented.split(), "Variant", "VARIANTS", "PRESETS"} <= set(mgk.__all__)
