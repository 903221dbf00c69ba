"""Parameters: what is read, what is refused and with which words, and how values are written back."""

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from mdc.config import (
    PRESETS,
    CaptionParams,
    DownloadParams,
    Params,
    PretrainParams,
    Section,
    Vocabulary,
    change_params,
    choose,
    load_params,
    merge,
    partial,
    read_yaml,
)
from mdc.errors import UserError
from mdc.layouts import LAYOUTS

SHIPPED = Path(__file__).parent.parent / "params.yaml"
# what the sample needs and another data set does not
OF_THE_SAMPLE = {
    "download": {"layout", "uid_column", "label_column", "group_column"},
    "evaluate": {"swaps"},
    "report": {"title", "credit"},
    "caption": {"test_share", "max_repeats", "alike_bits"},
}


def written(folder: Path, text: str) -> Path:
    path = folder / "params.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(UserError) as caught:
        load_params(written(folder, text))
    return str(caught.value)


class TestShippedFile:
    @pytest.mark.parametrize("section", Params.model_fields)
    def test_names_every_field_and_no_other(self, section: str) -> None:
        model = Params.model_fields[section].annotation
        assert model is not None
        assert list(read_yaml(SHIPPED)[section]) == list(model.model_fields)

    def test_explains_every_field(self) -> None:
        lines = SHIPPED.read_text(encoding="utf-8").splitlines()
        fields = [line for line in lines if re.match(r"(  )?[a-z_0-9]+:", line)]
        assert len(fields) == len(Params.model_fields) + sum(
            len(field.annotation.model_fields)  # type: ignore[union-attr]
            for field in Params.model_fields.values()
        )
        assert [line for line in fields if not re.search(r" # \S", line)] == []

    def test_differs_from_the_defaults_only_for_the_sample(self) -> None:
        shipped, default = load_params(SHIPPED).model_dump(), Params().model_dump()
        for section, values in shipped.items():
            different = {name for name, value in values.items() if value != default[section][name]}
            assert different == OF_THE_SAMPLE.get(section, set()), section

    def test_lists_every_preset(self) -> None:
        (line,) = [line for line in SHIPPED.read_text(encoding="utf-8").splitlines() if line.startswith("  preset:")]
        assert re.findall(r"[\w-]+", line.split("#")[1]) == [word for name in list(PRESETS)[:-1] for word in [name]] + [
            "or",
            list(PRESETS)[-1],
        ]

    def test_lists_every_layout(self) -> None:
        (line,) = [line for line in SHIPPED.read_text(encoding="utf-8").splitlines() if line.startswith("  layout:")]
        named = re.findall(r"[\w-]+", line.split("#")[1].split(":")[0])
        assert set(named) - {"or"} == set(LAYOUTS)


class TestLayouts:
    def test_fill_what_is_missing_or_null(self) -> None:
        assert DownloadParams(layout="cc3m").header == ["caption", "url"]
        recap = DownloadParams(layout="recap-datacomp-1b")
        assert recap.caption_columns == ["re_caption", "org_caption"]
        assert recap.line_breaks == "space"
        given = DownloadParams.model_validate({"layout": "sample", "uid_column": None, "label_column": ""})
        assert (given.uid_column, given.label_column, given.group_column) == ("uid", "", "base")
        assert DownloadParams.model_validate({"caption_column": ""}).caption_columns == []

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("layout: cc4m", "unknown layout 'cc4m' (did you mean 'cc3m'?)"),
            ("caption_column: [a, b, a]", "names a column twice"),
            ("header: [url, url]", "names a column twice"),
            ('url_column: ""', "names no column"),
            ("background: [0, 0, 256]", "download.background.2 = 256"),
        ],
    )
    def test_mistakes_are_named(self, tmp_path: Path, text: str, words: str) -> None:
        assert words in refusal(tmp_path, f"download:\n  {text}\n")

    @pytest.mark.parametrize("name", LAYOUTS)
    def test_change_how_a_list_is_read_and_nothing_else(self, name: str) -> None:
        how = {"header", "url_column", "caption_column", "uid_column", "label_column", "group_column", "line_breaks"}
        assert set(LAYOUTS[name]) <= how


class TestNumbers:
    @pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "0.0001"])
    def test_every_way_to_write_one_is_a_number(self, tmp_path: Path, text: str) -> None:
        assert load_params(written(tmp_path, f"pretrain:\n  lr: {text}\n")).pretrain.lr == 0.0001

    def test_small_and_whole_ones_too(self, tmp_path: Path) -> None:
        params = load_params(written(tmp_path, "pretrain:\n  lr: 5e-05\n  weight_decay: 0\n"))
        assert (params.pretrain.lr, params.pretrain.weight_decay) == (5e-5, 0.0)

    @pytest.mark.parametrize("text", ["1e-4", "5e-05", "1E4", "1_000", "0o17", "yes", "1.0", "null", "~", '"0.1"'])
    def test_are_read_as_dvc_reads_them(self, tmp_path: Path, text: str) -> None:
        from dvc.utils.serialize import load_yaml

        path = written(tmp_path, f"value: {text}\n")
        assert read_yaml(path) == load_yaml(str(path))

    @pytest.mark.parametrize("text", ['"0.1"', "true", "fast", "[0.1]", ".nan", ".inf", "-1.0", "0"])
    def test_anything_else_is_refused_by_key_and_value(self, tmp_path: Path, text: str) -> None:
        message = refusal(tmp_path, f"pretrain:\n  lr: {text}\n")
        assert message.startswith(f"{tmp_path / 'params.yaml'}: pretrain.lr = ")
        assert "\n" not in message

    def test_a_count_is_no_fraction(self, tmp_path: Path) -> None:
        assert "pretrain.batch_size = 8.0" in refusal(tmp_path, "pretrain:\n  batch_size: 8.0\n")

    def test_nothing_means_the_presets_value(self, tmp_path: Path) -> None:
        params = load_params(written(tmp_path, "pretrain:\n  lr:\n  steps: null\n"))
        assert (params.pretrain.lr, params.pretrain.steps) == (PRESETS["nano"]["lr"], PRESETS["nano"]["steps"])


class TestMistakes:
    @pytest.mark.parametrize("paths", ["{outputs: data/shards}", "{data: d, runs: d/captions/x}"])
    def test_a_path_in_what_a_stage_replaces(self, tmp_path: Path, paths: str) -> None:
        assert "which a stage replaces" in refusal(tmp_path, f"paths: {paths}")

    def test_a_misspelt_key_names_the_close_one(self, tmp_path: Path) -> None:
        message = refusal(tmp_path, "pretrain:\n  learing_rate: 1e-4\n  weight_deca: 0.1\n")
        assert "unknown parameter pretrain.learing_rate" in message
        assert "unknown parameter pretrain.weight_deca (did you mean 'weight_decay'?)" in message

    def test_a_misspelt_section_too(self, tmp_path: Path) -> None:
        assert "unknown parameter pretain (did you mean 'pretrain'?)" in refusal(tmp_path, "pretain:\n  lr: 1e-4\n")

    def test_an_unknown_objective_lists_the_known(self, tmp_path: Path) -> None:
        message = refusal(tmp_path, "pretrain:\n  objective: mcd\n")
        assert "pretrain.objective = 'mcd'" in message
        assert all(name in message for name in ("mdc", "cappa", "siglip"))

    def test_an_unknown_preset_lists_the_known(self, tmp_path: Path) -> None:
        message = refusal(tmp_path, "pretrain:\n  preset: nanoo\n")
        assert "unknown preset 'nanoo' (did you mean 'nano'?)" in message
        assert all(name in message for name in PRESETS)

    def test_every_mistake_is_told_at_once(self, tmp_path: Path) -> None:
        text = "shard:\n  seed: -1\nextract:\n  batch_size: 0\ncaption:\n  lowercase: 1\n"
        assert len(refusal(tmp_path, text).splitlines()) == 3

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("- a\n- b\n", "must hold sections"),
            ("pretrain: {lr: 1\n", "is not valid YAML"),
            ("pretrain: 3\n", "pretrain = 3"),
            ("shard:\n  seed: 1\n  seed: 2\n", "is not valid YAML"),
        ],
    )
    def test_a_file_of_another_form(self, tmp_path: Path, text: str, words: str) -> None:
        assert words in refusal(tmp_path, text)

    def test_bytes_that_are_no_text(self, tmp_path: Path) -> None:
        (tmp_path / "params.yaml").write_bytes(b"shard:\n  seed: \xff\n")
        with pytest.raises(UserError, match="is not valid YAML"):
            load_params(tmp_path / "params.yaml")

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="does not exist; run this in the project's folder"):
            load_params(tmp_path / "nowhere.yaml")

    @pytest.mark.parametrize("text", ["", "\n", "# nothing\n", "---\n"])
    def test_an_empty_file_is_a_mistake(self, tmp_path: Path, text: str) -> None:
        assert "params.yaml is empty; give it sections such as `pretrain:`, or {}" in refusal(tmp_path, text)

    def test_no_sections_may_be_meant(self, tmp_path: Path) -> None:
        assert load_params(written(tmp_path, "{}\n")) == Params()

    def test_a_section_without_values_is_a_mistake(self, tmp_path: Path) -> None:
        assert "pretrain = None: input should be" in refusal(tmp_path, "pretrain:\n")

    def test_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"cannot be read: Is a directory; name a file with parameters"):
            load_params(tmp_path)


class TestRules:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"pretrain": {"t_min": 1.0}}, "t_min 1.0 must be below t_max 1.0"),
            ({"pretrain": {"t_min": 0.0, "t_max": 0.0005}}, "must be above t_floor"),
            ({"pretrain": {"batch_size": 10, "accumulate": 3}}, "does not divide"),
            ({"pretrain": {"objective": "clip", "accumulate": 2}}, "set accumulate: 1"),
            ({"pretrain": {"objective": "siglip", "image_drop": 0.1}}, "set 0"),
            ({"pretrain": {"warmup_steps": 5000}}, "must be below steps"),
            ({"pretrain": {"decoder_heads": 7}}, "no multiple of decoder_heads"),
            ({"caption": {"min_tokens": 20}}, "min_tokens 20 is above max_tokens 12"),
            ({"caption": {"validation_share": 0.5, "test_share": 0.5}}, "leave nothing to train on"),
            ({"pretrain": {"preset": "vit_b16"}}, "raise download.image_size"),
            ({"compute": {"processes": 3}}, "does not divide over compute.processes 3"),
            ({"compute": {"launcher": "hosts", "hosts": 2, "endpoint": "a:99999"}}, "'a:99999' is no HOST:PORT"),
            ({"shard": {"target": "data/shards/tars"}}, "shard.target data/shards/tars lies in"),
            ({"tracking": {"required": True, "uri": ""}}, "required is true, but uri is empty"),
            ({"download": {"input": ""}}, "download.input = ''"),
            ({"evaluate": {"caption_length": 13}}, "caption_length 13 is above caption.max_tokens 12"),
            ({"evaluate": {"metric_lengths": [8, 20]}}, "metric_lengths 20 is above caption.max_tokens 12"),
        ],
    )
    def test_are_checked_with_the_fix(self, changes: dict[str, dict[str, object]], words: str) -> None:
        with pytest.raises(UserError, match=re.escape(words)):
            load_params(SHIPPED, changes)

    @pytest.mark.parametrize("name", PRESETS)
    def test_every_preset_holds_them(self, name: str) -> None:
        size = PRESETS[name]["image_size"]
        params = load_params(SHIPPED, {"pretrain": {"preset": name}, "download": {"image_size": size}})
        assert params.pretrain.encoder == PRESETS[name]["encoder"]

    @pytest.mark.parametrize(
        "ids",
        [
            {"pad_id": 0, "bos_id": 0, "eos_id": 2, "mask_id": 3},
            {"pad_id": 0, "bos_id": 1, "eos_id": 0, "mask_id": 3},
            {"pad_id": 0, "bos_id": 1, "eos_id": 2, "mask_id": 9},
        ],
    )
    def test_special_tokens_have_ids_of_their_own(self, ids: dict[str, int]) -> None:
        with pytest.raises(ValidationError):
            Vocabulary(size=9, unk_id=4, **ids)


class TestForms:
    def test_keep_what_was_set_only(self) -> None:
        form = partial(PretrainParams)
        assert form(lr=1e-4, steps=None).model_dump(exclude_unset=True) == {"lr": 1e-4, "steps": None}  # type: ignore[call-arg]

    @pytest.mark.parametrize("bad", [{"lrr": 1}, {"lr": "1e-4"}, {"lr": 0}, {"steps": 1.5}, {"objective": "x"}])
    def test_refuse_what_the_section_refuses(self, bad: dict[str, object]) -> None:
        with pytest.raises(ValidationError):
            partial(PretrainParams).model_validate(bad)

    @pytest.mark.parametrize("section", [DownloadParams, CaptionParams, PretrainParams])
    def test_show_limits_to_whoever_reads_the_schema(self, section: type[Section]) -> None:
        form, original = partial(section).model_json_schema(), section.model_json_schema()
        assert form["additionalProperties"] is False
        assert list(form["properties"]) == list(original["properties"])
        assert form.get("required", []) == []
        for name, field in original["properties"].items():
            shown = form["properties"][name]["anyOf"][0]
            for limit in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "enum", "minItems"):
                assert shown.get(limit) == field.get(limit), (name, limit)


class TestChanges:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return written(tmp_path, SHIPPED.read_text(encoding="utf-8"))

    def test_are_written_and_told(self, path: Path) -> None:
        lines = change_params(path, {"pretrain": {"lr": 1e-4, "seed": 0}, "download": {"background": [0, 0, 0]}})
        assert lines == ["pretrain.lr: None -> 0.0001", "download.background: [255, 255, 255] -> [0, 0, 0]"]
        params = load_params(path)
        assert (params.pretrain.lr, params.download.background) == (1e-4, [0, 0, 0])
        assert params == load_params(SHIPPED, {"pretrain": {"lr": 1e-4}, "download": {"background": [0, 0, 0]}})

    def test_leave_comments_and_other_lines_alone(self, path: Path) -> None:
        change_params(path, {"pretrain": {"lr": 1e-4}, "shard": {"seed": 3}, "extract": {"floors": False}})
        before = SHIPPED.read_text(encoding="utf-8")
        after = path.read_text(encoding="utf-8")
        assert re.findall("#.*", after) == re.findall("#.*", before)
        assert len(set(after.splitlines()) - set(before.splitlines())) == 3

    def test_of_nothing_touch_nothing(self, path: Path) -> None:
        before = path.stat().st_mtime_ns
        assert change_params(path, {}) == []
        assert change_params(path, {"shard": {"seed": 0}}) == []
        assert path.stat().st_mtime_ns == before

    def test_that_break_a_rule_are_not_written(self, path: Path) -> None:
        with pytest.raises(UserError, match="t_min"):
            change_params(path, {"pretrain": {"lr": 1e-4, "t_min": 1.0}})
        assert path.read_text(encoding="utf-8") == SHIPPED.read_text(encoding="utf-8")
        assert [file.name for file in path.parent.iterdir()] == ["params.yaml"]

    def test_may_add_a_section(self, tmp_path: Path) -> None:
        path = written(tmp_path, "# mine\nshard:\n  seed: 1\n")
        assert change_params(path, {"extract": {"batch_size": 2}}) == ["extract.batch_size: None -> 2"]
        assert load_params(path).extract.batch_size == 2
        assert path.read_text(encoding="utf-8").startswith("# mine\nshard:\n  seed: 1\n")

    def test_merge_sections_and_replace_lists(self) -> None:
        old = {"a": {"x": 1, "y": [1, 2]}, "b": 2}
        assert merge(old, {"a": {"y": [3]}, "c": {"z": 0}}) == {"a": {"x": 1, "y": [3]}, "b": 2, "c": {"z": 0}}
        assert old == {"a": {"x": 1, "y": [1, 2]}, "b": 2}


def test_choosing_by_name() -> None:
    table = {"one": 1, "two": 2}
    assert choose("number", "two", table) == 2
    with pytest.raises(UserError, match=r"unknown number 'tow' \(did you mean 'two'\?\); one of: one, two"):
        choose("number", "tow", table)
