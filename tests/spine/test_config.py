"""A config is valid, or one line names file, field and the nearest valid key."""

from pathlib import Path

import pytest

from draftsmith.config import Config, embedded, load_config
from draftsmith.errors import UserError
from draftsmith.settings import flat


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mine.yaml"


def refused(file: Path, text: str, *overrides: str) -> str:
    """The one line that refuses `text`."""
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_config(file, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("text", "field", "remedy"),
    [
        ("seeed: 1", "seeed", "did you mean seed?"),
        ("data: {max_lenght: 9}", "data.max_lenght", "did you mean data.max_length?"),
        ("max_length: 9", "max_length", "did you mean data.max_length?"),
        (
            "data: {sources: [{kind: python, domians: []}]}",
            "data.sources.0.domians",
            "did you mean data.sources.0.domains?",
        ),
        ("eagle: {mine: {rollout: 5}}", "eagle.mine.rollout", "did you mean eagle.mine.rollouts?"),
        ("target: {scratch: {zzz: 5}}", "target.scratch.zzz", "valid here:"),
    ],
)
def test_an_unknown_key_names_the_file_the_field_and_the_nearest_valid_key(
    file: Path, text: str, field: str, remedy: str
) -> None:
    message = refused(file, text)
    assert message.startswith(f"{file}: {field}: unknown key")
    assert remedy in message


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("evaluation: {K: 0}", "evaluation.K: must be greater than or equal to 1, got 0"),
        ("seed: abc", "seed: must be a valid integer"),
        (
            "data: {sources: [{kind: pyton}]}",
            "data.sources.0.kind: must be 'python', 'json', 'parquet', 'text' or 'hub', got 'pyton'",
        ),
        ("cache: 5", "cache: must be"),
        ("cache: {taps: many}", "cache.taps: must be 'auto'"),
        ("name: ../other", "name: must match pattern"),
        ("tracking: {trackers: [wandbb]}", "tracking.trackers.0: must be 'wandb'"),
        (
            "evaluation: {drafts: [eagel3]}\neagle: {eagle3: {}}",
            "evaluation.drafts: no draft 'eagel3'; did you mean 'eagle3'?",
        ),
        ("evaluation: {drafts: [x/oracle]}", "evaluation.drafts: x/oracle: its results would be called 'oracle'"),
        ("evaluation: {drafts: [x/a, y/a]}", "evaluation.drafts: two folders are called 'a'"),
        ("eagle: {oracle: {}}", "eagle.oracle: this name is taken"),
        ("eagle: {a.b: {}}", "eagle.a.b: a draft's name"),
        ("eagle: {mine: {}}\ncache: {taps: none}", "cache.taps: an EAGLE head (eagle.mine) is trained on taps"),
        ("target: {device: mps}", "target.device: 'mps' is not supported: GPU devices come with a later version"),
        (
            "target: {device: 'cuda:7'}",
            "target.device: 'cuda:7' is not supported: GPU devices come with a later version",
        ),
        ("cache: {shard_mb: .inf}", "cache.shard_mb: must be a finite number, got inf"),
        ("distill: {matrix_lr: .inf}", "distill.matrix_lr: must be a finite number, got inf"),
        ("distill: {shape: {hidden_size: 0}}", "distill.shape: must be 'half', 'quarter' or 'eighth'"),
        (f"seed: {2**63}", "seed: must be less than 9223372036854775808"),
        ("- seed", "holds a list"),
    ],
)
def test_a_wrong_value_names_the_file_the_field_and_what_is_right(file: Path, text: str, start: str) -> None:
    assert refused(file, text).startswith(f"{file}: {start}")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.yaml: no such config"):
        load_config(tmp_path / "absent.yaml")


@pytest.mark.parametrize(("text", "line"), [("a: [1,\n", 2), ("seed: 1\nname: x\nseed: 2\n", 3)])
def test_broken_yaml_and_keys_given_twice_name_the_line(file: Path, text: str, line: int) -> None:
    message = refused(file, text)
    assert f", line {line}: not valid YAML" in message or "line 1" in message


def test_an_override_wins_over_the_file_and_is_read_as_yaml(file: Path) -> None:
    file.write_text("seed: 1\nevaluation: {K: 3}\n")
    loaded = load_config(
        file, ["evaluation.K=4", "eagle.mine.rollouts=2", "evaluation.drafts=[mine]", "distill.clip=1e-3"]
    )
    assert loaded.config.evaluation.K == 4
    assert loaded.config.eagle["mine"].rollouts == 2
    assert loaded.config.evaluation.drafts == ("mine",)
    assert loaded.config.distill.clip == 1e-3
    assert loaded.given["seed"] == 1
    assert "run_root" not in loaded.given, "given is only what the user wrote"


def test_an_override_reaches_into_a_list(file: Path) -> None:
    file.write_text("data: {sources: [{kind: python, domains: [code, chat]}]}")
    assert load_config(file, ["data.sources.0.domains=[prose]"]).config.data.sources[0].domains == ("prose",)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("evaluation.K=0", "override 'evaluation.K=0': evaluation.K: must be greater than or equal to 1"),
        ("evaluation.k=1", "override 'evaluation.k=1': evaluation.k: unknown key; did you mean evaluation.K?"),
        ("evaluation.K", "write key.sub=value"),
        ("seed.x=1", "seed is a value and has no field x"),
        ("data.sources.7.kind=text", "data.sources has items 0 to 0, not 7"),
        ("seed=[", "not valid YAML"),
    ],
)
def test_a_wrong_override_is_named_as_the_user_typed_it(file: Path, override: str, said: str) -> None:
    assert said in refused(file, "seed: 1\ndata: {sources: [{kind: python}]}", override)


def test_the_name_of_a_run_defaults_to_the_file_and_the_folder_to_runs(file: Path) -> None:
    file.write_text("")
    config = load_config(file).config
    assert (config.name, config.run) == ("mine", Path("runs/mine"))


def test_a_section_with_every_line_commented_out_has_its_defaults(file: Path) -> None:
    file.write_text("distill:\n  # tokens: 5\n")
    assert load_config(file).config.distill == Config(name="x").distill


@pytest.mark.parametrize("name", ["demo", "demo-tiny"])
def test_the_embedded_configs_are_valid(name: str) -> None:
    config = load_config(embedded(name)).config
    assert config.name == name
    assert set(config.evaluation.drafts) == {
        "untrained", "distilled", "eagle3-no-rollout", "eagle3", "prompt-lookup", "oracle"
    }  # fmt: skip


def test_the_heads_of_the_demo_differ_in_their_rollouts_alone() -> None:
    eagle = load_config(embedded("demo")).config.eagle
    differing = {
        key
        for key, value in eagle["eagle3"].model_dump().items()
        if value != eagle["eagle3-no-rollout"].model_dump()[key]
    }
    assert differing == {"rollouts"}


def test_nested_values_become_dotted_names_in_their_order() -> None:
    values = {"b": {"y": 1, "x": {"z": [2]}}, "a": None, "empty": {}}
    assert list(flat(values).items()) == [("b.y", 1), ("b.x.z", [2]), ("a", None)]
    assert "b x z" in flat(values, " ")


def test_a_training_that_would_start_from_what_it_deletes_is_refused(tmp_path: Path) -> None:
    run, file = tmp_path / "runs" / "exp", tmp_path / "exp.yaml"
    (run / "eagle" / "h").mkdir(parents=True)
    (tmp_path / "link").symlink_to(run / "eagle" / "h")
    for given, field in (
        (f"eagle: {{h: {{start: {run}/eagle/h}}}}", "eagle.h.start"),
        (f"eagle: {{h: {{start: {tmp_path}/link}}}}", "eagle.h.start"),
        (f"distill: {{checkpoint: {run}/draft/distilled}}", "distill.checkpoint"),
        (f"distill: {{selective: {{reference: {run}/draft/distilled}}}}", "distill.selective.reference"),
    ):
        file.write_text(f"run_root: {tmp_path}/runs\n{given}\n")
        with pytest.raises(UserError, match=rf"{field}: .* another name"):
            load_config(file)
    file.write_text(f"run_root: {tmp_path}/runs\neagle: {{g: {{start: {run}/eagle/h}}}}\n")
    assert load_config(file).config.eagle["g"].start == f"{run}/eagle/h"
