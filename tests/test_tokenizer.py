"""Tokens and text agree, and a chat renders to the same tokens on any day."""

import json

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from workbench.errors import ModelError, PromptError
from workbench.tokenizer import ByteTokenizer, Tokenizer

DATED = "{{ strftime_now('%d %b %Y') }}|{{ date_string }}|{{ messages[0]['content'] | trim }}"


@pytest.fixture
def folder(tmp_path):
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    whole = {"special_tokens": ["<s>", "</s>"], "show_progress": False}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, **whole)
    backend.train_from_iterator(["the cat sat on the mat\n\n"] * 50, trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": DATED}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    return tmp_path


@pytest.mark.parametrize("text", ["the cat", "naïve 🙂 \n\n tail", "a\n\nb"])
def test_token_bytes_add_up_to_the_text(folder, text):
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes[k] for k in ids) == text.encode()
    assert tokenizer.decode(ids) == text


def test_special_tokens_are_known_and_have_no_bytes(folder):
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.bos_id == 0
    assert tokenizer.eos_ids == {1, 7}
    assert tokenizer.token_bytes[:2] == (b"", b"")
    assert tokenizer.encode("</s>the")[0] == 1


def test_an_end_of_sequence_that_is_not_marked_special_has_no_text_either(folder):
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"special": true', '"special": false'))
    assert Tokenizer.from_folder(folder).token_bytes[:2] == (b"<s>", b"")


def test_nor_has_one_that_is_an_entry_of_the_vocabulary(folder):
    """As of a GGUF file that does not mark its control tokens."""
    text = Tokenizer.from_folder(folder).token_bytes
    assert text[9] and text[7] == b"", "7 is an end of sequence of this config"


def test_a_chat_is_dated_the_same_every_day_and_its_template_is_in_the_fingerprint(folder):
    tokenizer = Tokenizer.from_folder(folder)
    chat = [{"role": "user", "content": " hi "}]
    assert tokenizer.render_chat(chat) == "26 Jul 2024|26 Jul 2024|hi"
    config = {"chat_template": DATED + "!"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.from_folder(folder).fingerprint != tokenizer.fingerprint


def test_a_template_of_its_own_file_goes_first_and_is_told_of_no_tools(folder):
    """As transformers has it."""
    text = "{% if tools is not none or documents is not none %}TOOLS{% endif %}own"
    (folder / "chat_template.jinja").write_text(text)
    assert Tokenizer.from_folder(folder).render_chat([]) == "own"


def test_what_is_missing_is_named(folder):
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(PromptError, match="no chat template"):
        Tokenizer.from_folder(folder).render_chat([])
    (folder / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json holds \[1\]; allowed: an object"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    stored = json.loads(whole := (folder / "tokenizer.json").read_text())
    stored["model"]["vocab"]["日"] = 299 + len(stored["model"]["vocab"])
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(ModelError, match="is '日'; its letters are no bytes"):
        _ = Tokenizer.from_folder(folder).token_bytes
    (folder / "tokenizer.json").write_text(whole)
    (folder / "config.json").write_text('{"eos_token_id": ["4"]}')
    said = r"config\.json has eos_token_id \['4'\]; allowed: a token"
    with pytest.raises(ModelError, match=said):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("name", ["BPEDecoder", "WordPiece", "CTC"])
def test_pieces_that_are_joined_by_rules_have_no_bytes_of_their_own(name):
    """Guards texts and stop strings that no decoder would give."""
    backend = Backend(models.WordLevel({"a</w>": 0, "##b": 1}, unk_token="a</w>"))
    backend.decoder = getattr(decoders, name)()
    with pytest.raises(ModelError, match=rf"by rules \({name}\); supported"):
        _ = Tokenizer(backend, {}).token_bytes
    backend.decoder = decoders.Fuse()
    backend.add_tokens(["x"])
    own = Backend(models.WordLevel({"<0x0A>": 0, "<0xGG>": 1}, unk_token="<0xGG>"))
    assert Tokenizer(own, {}).token_bytes == (b"\n", b"<0xGG>")


@pytest.mark.parametrize(
    ("config", "tokenizer_config", "said"),
    [
        ({"eos_token_id": 10**15}, {}, "eos_token_id 1000000000000000; allowed: a token id below"),
        ({"eos_token_id": -1}, {}, "eos_token_id -1; allowed"),
        ({}, {"eos_token": "</nowhere>"}, "no token: no sequence would end"),
        ({}, {"eos_token": 5}, "A special token is 5; allowed: a text"),
        ({}, {"eos_token": ["</s>"]}, "A special token is"),
        ({}, {"eos_token": {"content": 5}}, "A special token is"),
    ],
)
def test_ends_that_cannot_be_are_refused(folder, config, tokenizer_config, said):
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    with pytest.raises(ModelError, match=said):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("template", [["x"], "{{ 1 / 0 }}", "{{ messages[0]['content'] }}"])
def test_a_chat_that_cannot_be_written_is_the_prompt_s_error(folder, template):
    """A list of what are no templates, one that cannot be computed, half a character."""
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(PromptError, match=r"chat template|half of a surrogate pair"):
        Tokenizer.from_folder(folder).encode_chat([{"role": "user", "content": "\ud835"}])


def test_the_byte_tokenizer_has_the_same_surface():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("añb")) == "añb"
    public = {name for name in vars(Tokenizer) if not name.startswith("_")}
    assert public - {"from_folder", "save"} <= set(dir(tokenizer))  # of files


def test_ids_with_gaps_templates_by_name_and_messages_that_cannot_be_rendered() -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "c": 5}, unk_token="a"))
    named = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "{{ 'x' + messages[0].content }}"},
    ]
    tokenizer = Tokenizer(backend, {"chat_template": named})
    assert tokenizer.vocab_size == 6 and tokenizer.token_bytes[5] == b"c"
    with pytest.raises(PromptError, match="cannot render these messages"):
        tokenizer.render_chat([{"role": "user", "content": None}])
