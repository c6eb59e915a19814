"""Fixtures of all tests: memory filled with NaN, and the number of cases that were compared with the oracle."""

import os
from collections import Counter

import pytest
import torch

# The cases are small and each worker has one core: with more threads the tests took 40 times as long.
torch.set_num_threads(1)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# The tests of the kernels need a GPU, or the process under Triton's interpreter that test_interpreter.py starts.
if not torch.cuda.is_available() and not INTERPRETED:
    collect_ignore = ["kernels"]

# Minimum number of passed cases per dtype in a full run of TABLE, by backend and variant.
MINIMUM = {
    ("eager", "mgk"): 100,
    ("eager", "mgk-hard"): 100,
    ("eager", "smgk"): 100,
    ("eager", "smgk-hard"): 100,
    ("sdpa", "mgk"): 96,
    ("sdpa", "smgk"): 96,
    ("factored", "smgk"): 56,
    ("plain", "softmax"): 10,
    ("eager", "mlk"): 24,
    ("eager", "smlk"): 24,
    ("chunked", "mlk"): 24,
    ("chunked", "smlk"): 24,
}
DTYPES = ("float64", "float32", "float16", "bfloat16")
TABLE = "test_operators.py"

passed: Counter[tuple[str, ...]] = Counter()  # cases by backend, variant and dtype
complete = True  # whether all of TABLE was collected; the workers send it to the controller


def pytest_addoption(parser):
    parser.addoption("--shard", default="1/1", help="K/N: run only the K-th of N parts of the tests.")


class PrintFailures:
    """Plugin that prints each failure immediately, because a GPU machine may stop before the end of the run."""

    def __init__(self, config):
        self.config = config

    def pytest_runtest_logreport(self, report):
        if report.failed:
            terminal = self.config.pluginmanager.get_plugin("terminalreporter")
            terminal.write_line(f"\n{report.nodeid}, {report.when}\n{report.longreprtext}")


def pytest_configure(config):
    if config.getoption("--shard") != "1/1":
        config.pluginmanager.register(PrintFailures(config))


def pytest_collection_modifyitems(config, items):
    """Select the tests of --shard: N processes share the compilation of kernels without pytest-xdist."""
    part, parts = map(int, config.getoption("--shard").split("/"))
    deselected = [item for index, item in enumerate(items) if index % parts != part - 1]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = items[part - 1 :: parts]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def poisoned():
    """Fill uninitialized memory with NaN, which reveals a kernel that reads what it has not written."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # torch.utils.deterministic.fill_uninitialized_memory is on by default
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=INTERPRETED)
def filled_with_max(monkeypatch):
    """Fill uninitialized memory with the largest number under Triton's interpreter.

    Arithmetic with it overflows, and NumPy's warning is an error, even if the result is not used. Without the fixture
    this would happen at random.
    """

    def filled(allocate):
        def allocate_filled(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(torch.finfo(tensor.dtype).max) if tensor.is_floating_point() else tensor

        return allocate_filled

    for owner, names in ((torch, ("empty", "empty_like")), (torch.Tensor, ("new_empty", "new_empty_strided"))):
        for name in names:
            monkeypatch.setattr(owner, name, filled(getattr(owner, name)))


@pytest.fixture
def oracle_case(record_property):
    """Return a function that records a comparison with the oracle. It is counted if the test passes."""
    return lambda backend, variant, dtype: record_property("oracle", (backend, variant, str(dtype).split(".")[-1]))


def pytest_deselected(items):
    global complete
    complete = complete and not any(item.path.name == TABLE for item in items)


def pytest_collection_finish(session):
    global complete
    collected = any(item.path.name == TABLE for item in session.items)
    complete = complete and collected and not any("::" in argument for argument in session.config.args)
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["complete"] = complete


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    global complete
    complete = getattr(node, "workeroutput", {}).get("complete", False)


def pytest_runtest_logreport(report):
    if report.when == "call" and report.passed:
        passed.update(tuple(case) for name, case in report.user_properties if name == "oracle")


def below_minimum() -> list[str]:
    return [
        f"{backend} {variant} {dtype}: {passed[backend, variant, dtype]} < {minimum}"
        for (backend, variant), minimum in MINIMUM.items()
        for dtype in DTYPES
        if passed[backend, variant, dtype] < minimum
    ]


def pytest_sessionfinish(session, exitstatus):
    is_worker = hasattr(session.config, "workerinput")
    if session.config.option.collectonly:
        return
    if not is_worker and complete and below_minimum() and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    if not passed:
        return
    terminalreporter.section("cases compared with the oracle")
    terminalreporter.write_line(f"{'backend':10}{'variant':12}" + "".join(f"{dtype:>10}" for dtype in DTYPES))
    for backend, variant in dict.fromkeys([*MINIMUM, *(case[:2] for case in passed)]):
        row = [passed[backend, variant, dtype] for dtype in DTYPES]
        terminalreporter.write_line(f"{backend:10}{variant:12}" + "".join(f"{n:10}" for n in row))
    for line in below_minimum() if complete else []:
        terminalreporter.write_line(f"below the minimum: {line}", red=True)
