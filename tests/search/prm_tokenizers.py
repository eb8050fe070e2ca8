"""Small tokenizers of the kinds that published reward models have, made here, nothing downloaded.

`qwen_like`: bytes as tokens and Qwen's special tokens, with its chat template's shape.
`mistral_like`: SentencePiece's way with spaces (one is put before every text, then each is part of
the piece that follows), with the pieces that Math-Shepherd looks up.
"""

import json
import string
from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPACE = "\u2581"


def qwen_like() -> Backend:
    """256 bytes, then <|im_start|>, <|im_end|>, <|endoftext|> and <extra_0>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({piece: k for k, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<extra_0>")
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    return backend


def mistral_like() -> Backend:
    """Characters and bytes, and as single pieces a space with the letters, marks or "ки" after."""
    letters = string.ascii_letters + string.digits + "+-=.:?" + SPACE + "ки"
    joined = [(SPACE, letter) for letter in letters if letter not in (SPACE, "к", "и")]
    joined += [("к", "и"), (SPACE, "ки"), ("S", "t"), (SPACE, "St")]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    pieces += ["".join(pair) for pair in joined]
    vocab = {piece: k for k, piece in enumerate(dict.fromkeys(pieces))}
    backend = Backend(models.BPE(vocab, joined, byte_fallback=True, unk_token="<unk>"))
    parts = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    backend.normalizer = normalizers.Sequence(parts)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def save(backend: Backend, folder: Path, bos_token: str | None = None) -> int:
    """Write tokenizer.json and its config into a model's folder; answers the vocabulary's size."""
    backend.save(str(folder / "tokenizer.json"))
    config = {"chat_template": CHATML, "bos_token": bos_token}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return backend.get_vocab_size(with_added_tokens=True)
