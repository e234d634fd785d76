"""Configuration from names, dictionaries and files."""

import json

import pytest

from kvpass.config import KVQuantConfig


def test_a_name_a_dictionary_and_a_config_are_the_same():
    config = KVQuantConfig(format="nvfp4")
    assert KVQuantConfig.of("nvfp4") == KVQuantConfig.of({"format": "nvfp4"}) == KVQuantConfig.of(config) == config
    assert (config.key.name, config.value.name) == ("nvfp4", "nvfp4")


def test_formats_apart():
    config = KVQuantConfig(key_format="fp8_e4m3", value_format="nvfp4")
    assert (config.key.name, config.value.name) == ("fp8_e4m3", "nvfp4")


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_file_round_trip(tmp_path, suffix):
    config = KVQuantConfig(format="nvfp4", key_format="fp8_e5m2", strict=True)
    path = tmp_path / f"kv.{suffix}"
    path.write_text(json.dumps(config.to_dict()))  # JSON is YAML
    assert KVQuantConfig.from_file(path) == config
    assert set(config.to_dict()) == {"format", "key_format", "strict"}


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("nvfp5", ValueError, "unknown KV format 'nvfp5'; known: bf16"),
        ({"format": "nvfp4", "key_fromat": "bf16"}, ValueError, r"'key_fromat'; known: .*Did you mean 'key_format'\?"),
        ({"value_format": "fp3"}, ValueError, "unknown KV format 'fp3'"),
        ({"format": None}, ValueError, "unknown KV format None"),
        ("kv.json", ValueError, r"'kv.json' is a file; read it with kvpass.KVQuantConfig.from_file"),
        ({"strict": "yes"}, ValueError, "strict is 'yes'; allowed: True, False"),
        (7, TypeError, "expected a format's name, a dictionary or a KVQuantConfig, got int"),
    ],
)
def test_bad_input(given, error, message):
    with pytest.raises(error, match=message):
        KVQuantConfig.of(given)


@pytest.mark.parametrize(("text", "message"), [("{", "is not valid JSON"), ("[1]", "holds a list; expected a mapping")])
def test_bad_file(tmp_path, text, message):
    path = tmp_path / "kv.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        KVQuantConfig.from_file(path)
