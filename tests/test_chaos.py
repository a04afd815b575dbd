"""A small part of `make chaos`: one fault of four kinds, on the stages up to distillation."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

PLACE = Path(__file__).parents[1] / "benchmarks" / "chaos.py"


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Any:
    spec = importlib.util.spec_from_file_location("chaos", PLACE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.Campaign(tmp_path_factory.mktemp("chaos"), ("prepare", "cache", "distill"))
    made.prepare()
    return made


@pytest.mark.parametrize(("number", "kind"), [(0, "kill"), (3, "flip"), (4, "full disk"), (5, "tracker")])
def test_a_fault_is_survived_or_stopped_in_one_line(campaign: Any, number: int, kind: str) -> None:
    fault = campaign.fault(number)
    assert fault["kind"] == kind
    assert fault["outcome"] in ("survived", "stopped"), fault
