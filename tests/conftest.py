"""Shared by all tests: poisoned memory, and the count of the cases that were compared with the oracle."""

import os
from collections import Counter

import pytest
import torch

# Small cases, and cores that belong to the workers: threads that wait for each other took 40 x the time.
torch.set_num_threads(1)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# The tests of the kernels need a GPU, or the process under Triton's interpreter that test_interpreter.py starts.
if not torch.cuda.is_available() and not INTERPRETED:
    collect_ignore = ["kernels"]

# Passed cases that a full run of the operators' table must reach: (backend, variant) -> cases for each dtype.
MINIMUM = {
    ("eager", "mgk"): 100,
    ("eager", "mgk-hard"): 100,
    ("eager", "smgk"): 100,
    ("eager", "smgk-hard"): 100,
    ("sdpa", "mgk"): 96,
    ("sdpa", "smgk"): 96,
    ("plain", "softmax"): 10,
    ("eager", "mlk"): 24,
    ("eager", "smlk"): 24,
    ("chunked", "mlk"): 24,
    ("chunked", "smlk"): 24,
}
DTYPES = ("float64", "float32", "float16", "bfloat16")
TABLE = "test_operators.py"

passed: Counter[tuple[str, ...]] = Counter()  # (backend, variant, dtype) -> cases
complete = True  # whether all of TABLE was collected; known to the workers, and told to the controller


def pytest_addoption(parser):
    parser.addoption("--shard", default="1/1", help="K/N: only the K-th of N parts of the tests")


class ToldAtOnce:
    """What failed is written when it fails, and not only at the end: a GPU may be taken away before."""

    def __init__(self, config):
        self.config = config

    def pytest_runtest_logreport(self, report):
        if report.failed:
            terminal = self.config.pluginmanager.get_plugin("terminalreporter")
            terminal.write_line(f"\n{report.nodeid}, {report.when}\n{report.longreprtext}")


def pytest_configure(config):
    if config.getoption("--shard") != "1/1":
        config.pluginmanager.register(ToldAtOnce(config))


def pytest_collection_modifyitems(config, items):
    """For machines without pytest-xdist: kernels take long to compile, and N processes share the work."""
    part, parts = map(int, config.getoption("--shard").split("/"))
    left_out = [item for index, item in enumerate(items) if index % parts != part - 1]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = items[part - 1 :: parts]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def poisoned():
    """Uninitialised memory is NaN, so a kernel that reads what it never wrote is found out."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # torch.utils.deterministic.fill_uninitialized_memory is on by default
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=INTERPRETED)
def crowded(monkeypatch):
    """Where kernels are interpreted, uninitialised memory holds the largest number there is: to calculate with it
    overflows, and NumPy's warning of that is an error, also where the result is thrown away. Left as it is, it would
    only sometimes be one."""

    def filled(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor.fill_(torch.finfo(tensor.dtype).max) if tensor.is_floating_point() else tensor

        return made

    for owner, names in ((torch, ("empty", "empty_like")), (torch.Tensor, ("new_empty", "new_empty_strided"))):
        for name in names:
            monkeypatch.setattr(owner, name, filled(getattr(owner, name)))


@pytest.fixture
def oracle_case(record_property):
    """Called by a test once it has compared a case with the oracle; counted when the test passes."""
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


def missing() -> list[str]:
    return [
        f"{backend} {variant} {dtype}: {passed[backend, variant, dtype]} < {least}"
        for (backend, variant), least in MINIMUM.items()
        for dtype in DTYPES
        if passed[backend, variant, dtype] < least
    ]


def pytest_sessionfinish(session, exitstatus):
    on_worker = hasattr(session.config, "workerinput")
    if session.config.option.collectonly:
        return
    if not on_worker and complete and missing() and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    if not passed:
        return
    terminalreporter.section("cases compared with the oracle")
    terminalreporter.write_line(f"{'backend':10}{'variant':12}" + "".join(f"{dtype:>10}" for dtype in DTYPES))
    for backend, variant in dict.fromkeys([*MINIMUM, *(case[:2] for case in passed)]):
        row = [passed[backend, variant, dtype] for dtype in DTYPES]
        terminalreporter.write_line(f"{backend:10}{variant:12}" + "".join(f"{n:10}" for n in row))
    for line in missing() if complete else []:
        terminalreporter.write_line(f"below the minimum: {line}", red=True)
