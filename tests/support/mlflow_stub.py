"""Stand-in for mlflow with the part of its interface that Lightning's MLFlowLogger and the tests use.

mlflow's dependencies conflict with the pins of constraints.txt. Tests use mlflow itself where it is installed, as
`make test-trackers` does.
"""

import json
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlparse


class MlflowClient:
    """File store of one JSON file."""

    def __init__(self, tracking_uri: str) -> None:
        self._file = Path(urlparse(tracking_uri).path) / "store.json"

    def _read(self) -> dict:
        return json.loads(self._file.read_text()) if self._file.exists() else {"experiments": [], "runs": []}

    def _write(self, store: dict) -> None:
        self._file.write_text(json.dumps(store))

    def _run(self, store: dict, run_id: str) -> dict:
        if run_id not in [run["id"] for run in store["runs"]]:
            raise RuntimeError(f"Run '{run_id}' not found")
        return next(run for run in store["runs"] if run["id"] == run_id)

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        names = self._read()["experiments"]
        return SimpleNamespace(experiment_id=name, lifecycle_stage="active") if name in names else None

    def create_experiment(self, name: str, artifact_location: str | None = None) -> str:
        store = self._read()
        store["experiments"].append(name)
        self._write(store)
        return name

    def create_run(self, experiment_id: str, tags: dict) -> SimpleNamespace:
        store = self._read()
        run = {"id": f"run{len(store['runs'])}", "experiment": experiment_id, "tags": tags, "params": {}, "metrics": []}
        store["runs"].append(run)
        self._write(store)
        return self.get_run(run["id"])

    def get_run(self, run_id: str) -> SimpleNamespace:
        run = self._run(self._read(), run_id)
        info = SimpleNamespace(run_id=run["id"], experiment_id=run["experiment"])
        return SimpleNamespace(info=info, data=SimpleNamespace(params=run["params"], tags=run["tags"]))

    def log_batch(self, run_id: str, metrics: list = (), params: list = ()) -> None:
        store = self._read()
        run = self._run(store, run_id)
        for param in params:
            if run["params"].setdefault(param.key, param.value) != param.value:
                raise RuntimeError(f"Changing param values is not allowed: {param.key}")
        run["metrics"] += [[metric.key, metric.value, metric.step] for metric in metrics]
        self._write(store)

    def set_terminated(self, run_id: str, status: str) -> None:
        self._run(self._read(), run_id)

    def search_runs(self, experiment_ids: list) -> list:
        return [self.get_run(run["id"]) for run in self._read()["runs"] if run["experiment"] in experiment_ids]

    def get_metric_history(self, run_id: str, key: str) -> list:
        metrics = self._run(self._read(), run_id)["metrics"]
        return [SimpleNamespace(value=value, step=step) for name, value, step in metrics if name == key]


def install(monkeypatch) -> None:
    """Put the stand-in into sys.modules."""
    content = {
        "mlflow": {"set_tracking_uri": lambda uri: None},
        "mlflow.tracking": {"MlflowClient": MlflowClient},
        "mlflow.tracking.context": {},
        "mlflow.tracking.context.registry": {"resolve_tags": dict},
        "mlflow.entities": {"Metric": SimpleNamespace, "Param": SimpleNamespace},
        "mlflow.utils": {},
        "mlflow.utils.mlflow_tags": {"MLFLOW_RUN_NAME": "mlflow.runName"},
    }
    for name, names in content.items():
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("pytorch_lightning.loggers.mlflow._MLFLOW_AVAILABLE", True)
