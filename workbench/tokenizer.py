"""Text to token ids and back: a `tokenizers` file with its chat template; bytes for tests.

The chat template is rendered by jinja2 in a sandbox with a fixed date, so that tokens do not change
from day to day.
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from workbench.errors import ModelError, PromptError

FIXED_DATE = "26 Jul 2024"
MOST_TOKENS = 2**31  # no vocabulary comes near it
JOINED_BY_RULES = re.compile(r"\b(WordPiece|BPEDecoder|CTC)\(")  # decoders
Messages = list[dict[str, str]]


class Tokenizer:
    """A model folder's tokenizer.json, with the chat template of its tokenizer_config.json."""

    def __init__(
        self, backend: Backend, config: dict[str, Any], eos_ids: Iterable[int] = ()
    ) -> None:
        self._backend = backend
        self._config = config
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.bos_id = self._special_id("bos_token")
        own_eos = self._special_id("eos_token")
        self.eos_ids = frozenset(eos_ids) | (frozenset() if own_eos is None else {own_eos})

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read the tokenizer's files, and the end-of-sequence ids of (generation_)config.json."""
        folder = Path(folder)
        file, older = folder / "tokenizer.json", folder / "vocab.json"
        if not file.is_file() and _read_json(folder / "config.json").get("model_type") == "gpt2":
            file = older
        if not file.is_file():
            raise ModelError(
                f"{folder} has no tokenizer.json; a model folder needs one (fast tokenizer "
                "format), a GPT-2's that or vocab.json and merges.txt."
            )
        try:
            backend = _byte_level(older) if file == older else Backend.from_file(str(file))
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelError(f"{file} cannot be read: {error}") from error
        backend.no_padding()
        backend.no_truncation()
        config = _read_json(folder / "tokenizer_config.json")
        if (folder / "chat_template.jinja").is_file():  # goes before what config says
            config["chat_template"] = _read_text(folder / "chat_template.jinja")
        eos_ids: list[int] = []
        for name in ("generation_config.json", "config.json"):
            given = _read_json(folder / name).get("eos_token_id")
            ids = given if isinstance(given, list) else [] if given is None else [given]
            if not all(type(each) is int and 0 <= each < MOST_TOKENS for each in ids):
                allowed = f"a token id below {MOST_TOKENS:,}, or a list of them"
                raise ModelError(f"{folder / name} has eos_token_id {given!r}; allowed: {allowed}.")
            eos_ids += ids
        return cls(backend, config, eos_ids)

    def save(self, folder: str | Path) -> None:
        """Write the files that `from_folder`, transformers and vLLM read it from."""
        self._backend.save(str(Path(folder, "tokenizer.json")))
        config = {"tokenizer_class": "PreTrainedTokenizerFast"} | self._config
        Path(folder, "tokenizer_config.json").write_text(json.dumps(config, indent=1))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written out in it are recognised."""
        utf8(text)
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: Messages, add_generation_prompt: bool = True) -> str:
        """The chat as the model was trained to see it, dated 26 Jul 2024 where it has a date."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        special = {n: _token_text(self._config[n]) for n in names if self._config.get(n)}
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt, **special}
        given |= {"tools": None, "documents": None}
        try:
            return self._template.render(**given, date_string=FIXED_DATE)
        except PromptError:
            raise
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise PromptError(f"The chat template cannot render these messages: {error}") from error

    def encode_chat(self, messages: Messages, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a rendered chat; the template writes its own special tokens."""
        chat = self.render_chat(messages, add_generation_prompt)
        return self.encode(chat, add_special_tokens=False)

    @cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        """The bytes each token id adds to the text, b"" for special tokens and ends of sequence."""
        added = self._backend.get_added_tokens_decoder()
        kind = f"{self._backend.pre_tokenizer!r} {self._backend.decoder!r}"
        if found := JOINED_BY_RULES.search(kind):
            raise ModelError(
                f"This tokenizer joins its pieces by rules ({found[1]}); supported: byte-level and "
                "SentencePiece."
            )
        # GPT-2's printable stand-in for each byte (Radford et al. 2019), inverted: code -> byte.
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = [byte for byte in range(256) if byte not in shown]
        alphabet = dict(zip([*shown, *range(256, 256 + len(hidden))], [*shown, *hidden]))

        def bytes_of(token_id: int) -> bytes:
            piece = self._backend.id_to_token(token_id) or ""
            if token_id in self.eos_ids or (token_id in added and added[token_id].special):
                return b""
            if token_id in added:
                return piece.encode()
            if "ByteLevel" in kind:
                try:
                    return piece.translate(alphabet).encode("latin-1")
                except UnicodeEncodeError as error:
                    told = "its letters are no bytes, as those of a byte-level vocabulary are"
                    raise ModelError(f"Token {token_id} is {piece!r}; {told}.") from error
            if re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
                return bytes([int(piece[3:5], 16)])  # SentencePiece's
            return piece.replace("\u2581", " ").encode()

        return tuple(map(bytes_of, range(self.vocab_size)))

    @cached_property
    def fingerprint(self) -> str:
        """12 hexadecimal digits over vocabulary, rules and chat template."""
        text = self._backend.to_str() + str(self._config.get("chat_template")) + FIXED_DATE
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @cached_property
    def _template(self) -> Any:
        source = self._config.get("chat_template")
        if isinstance(source, list) and all(isinstance(each, dict) for each in source):
            named = {each.get("name"): each.get("template") for each in source}
            source = named.get("default")
        if not isinstance(source, str):
            raise PromptError(
                "This model has no chat template; run_search and chat requests need one "
                "(tokenizer_config.json: chat_template, or chat_template.jinja)."
            )

        def refuse(message: str) -> None:
            raise PromptError(f"The model's chat template refuses these messages: {message}")

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.globals |= {
            "raise_exception": refuse,
            "strftime_now": lambda format: FIXED_DATE,
        }
        environment.filters["tojson"] = lambda value, **k: json.dumps(value, ensure_ascii=False)
        return environment.from_string(source)

    def _special_id(self, name: str) -> int | None:
        text = self._config.get(name)
        found = None if text is None else self._backend.token_to_id(_token_text(text))
        if found is None and text is not None and name == "eos_token":
            raise ModelError(f"The {name} is {text!r}, which is no token: no sequence would end.")
        return found


def utf8(text: str) -> bytes:
    """The text's bytes; PromptError for half of a surrogate pair, which has none."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"The text has {text[error.start]!r} at character {error.start}, half of a "
            "surrogate pair; give valid Unicode."
        ) from None


def _byte_level(vocabulary: Path) -> Backend:
    """GPT-2's byte-level BPE, of the two files that its older folders keep it in."""
    merges = vocabulary.with_name("merges.txt")
    backend = Backend(BPE.from_file(str(vocabulary), str(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    return backend


def _token_text(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ModelError(f"A special token is {token!r:.100}; allowed: a text, or one as content.")
    return text


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is no text in UTF-8: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(_read_text(path))
    except ValueError as error:
        raise ModelError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds {reprlib.repr(found)}; allowed: an object.")
    return found


class ByteTokenizer:
    """One token a byte, then <bos> and <eos>: Tokenizer's surface without a file, for tests."""

    vocab_size = 258
    bos_id = 256
    eos_ids = frozenset({257})
    token_bytes = (*(bytes([b]) for b in range(256)), b"", b"")
    fingerprint = "bytes"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The text's UTF-8 bytes; there are no special tokens to add."""
        return list(utf8(text))

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids; <bos> and <eos> have none."""
        return b"".join(self.token_bytes[k] for k in ids).decode(errors="replace")

    def render_chat(self, messages: Messages, add_generation_prompt: bool = True) -> str:
        """A conversation as text, roles and ends in brackets."""
        turns = "".join(f"[{m['role']}]{m['content']}[end]" for m in messages)
        return turns + ("[assistant]" if add_generation_prompt else "")

    def encode_chat(self, messages: Messages, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a rendered chat."""
        return self.encode(self.render_chat(messages, add_generation_prompt))
