"""Codecs between text and tokens, and the form of a conversation.

A codec is a byte-level BPE (Hugging Face `tokenizers`) that never produces a special token from text,
whatever the text says, plus special tokens known by id alone and the shape of one turn. Two kinds:

    train_codec   a small vocabulary of its own    <bos><user>text<assistant>...<eos><user>text<assistant>...
    hf_codec      that of a ChatML chat model    <|im_start|>user\\ntext<|im_end|>\\n<|im_start|>assistant...

The end-of-turn token is sampled by the model and stays in the sequence, so a conversation only ever grows:
`tokens += codec.open_turn(feedback, first=False)`. Nothing is rendered or tokenised twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from dk_jax.generation.templates import TurnFormat, turn_format

SPECIALS = ("<pad>", "<bos>", "<eos>", "<user>", "<assistant>")

# One digit, one word or identifier, or one run of punctuation, each with the space before it; or white space,
# leaving the last space of a run to what follows. Merges stay within a piece, so newline and indentation can
# become one token, and neither words nor operators ever grow into each other.
_PIECES = r" ?\p{N}| ?[\p{L}\p{M}_]+| ?[^\s\p{L}\p{M}\p{N}_]+|\s+(?!\S)|\s+"

_TOKENIZER_FILE, _CODEC_FILE = "tokenizer.json", "codec.json"


OWN_FORMAT = TurnFormat(
    first=("<bos>", "<user>", "{text}", "<assistant>"),
    later=("<user>", "{text}", "<assistant>"),
)
_CHATML_TURN = ("<|im_start|>", "user\n{text}", "<|im_end|>", "\n", "<|im_start|>", "assistant\n")
CHATML_FORMAT = TurnFormat(first=_CHATML_TURN, later=("\n", *_CHATML_TURN))


class Codec:
    """Text to token ids and back; see the module's docstring.

    Attributes:
      vocab_size: one more than the largest id.
      pad_id: fills unused positions; may equal eos_id, since padding is known by position alone.
      eos_id: ends an assistant's turn.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        specials: Mapping[str, int],
        turn_format: TurnFormat,
        eos: str,
        pad: str,
        plain_additions: Mapping[str, int] | None = None,
    ):
        """Args:
        tokenizer: byte-level BPE with no added tokens of its own.
        specials: name -> id of the tokens that text can neither produce nor contain.
        turn_format: how a turn is written.
        eos, pad: names of two specials.
        plain_additions: text -> id of tokens that a model may emit and that decode to text, though encoding
          never produces them (Qwen3's "<think>").
        """
        for name in (eos, pad, *turn_format.first, *turn_format.later):
            if name not in specials and (name in (eos, pad) or _looks_special(name)):
                raise ValueError(f"codec: special token {name!r} is not in the vocabulary")
        self._tokenizer = tokenizer
        self._specials = dict(specials)
        self._special_ids = frozenset(specials.values())
        self._format = turn_format
        self._eos, self._pad = eos, pad
        self._additions = dict(plain_additions or {})
        self._addition_texts = {i: text for text, i in self._additions.items()}
        self.eos_id, self.pad_id = specials[eos], specials[pad]
        highest = [tokenizer.get_vocab_size() - 1, *self._special_ids, *self._addition_texts]
        self.vocab_size = max(highest) + 1

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; what looks like a special token in it is encoded letter by letter.

        Raises:
          ValueError: for a lone surrogate, which no UTF-8 can carry.
        """
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise ValueError(f"encode: the text is not valid Unicode: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens and ids beyond the vocabulary dropped. `decode(encode(s)) == s`,
        except where a published tokenizer normalises (Qwen3: Unicode NFC). Broken UTF-8 gives replacement
        characters."""
        if not any(i in self._addition_texts for i in ids):
            return self._decode_plain(ids)
        parts, run = [], []
        for i in ids:
            if i in self._addition_texts:
                parts += [self._decode_plain(run), self._addition_texts[i]]
                run = []
            else:
                run.append(i)
        return "".join([*parts, self._decode_plain(run)])

    def open_turn(self, text: str, first: bool) -> list[int]:
        """A user's message and the opening of the assistant's answer.

        Args:
          text: the message.
          first: whether it opens the conversation. If not, what it is appended to must end with `eos_id`;
            append one where the assistant was cut off.
        """
        ids, text = [], text.strip() if self._format.trims else text
        for piece in self._format.first if first else self._format.later:
            if piece in self._specials:
                ids.append(self._specials[piece])
            else:
                ids += self.encode(piece.replace("{text}", text))
        return ids

    def save(self, directory: str | Path) -> None:
        """Writes tokenizer.json and codec.json, which `load_codec` reads."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(directory / _TOKENIZER_FILE))
        description = {
            "specials": self._specials,
            "plain_additions": self._additions,
            "eos": self._eos,
            "pad": self._pad,
            "first": self._format.first,
            "later": self._format.later,
            "trims": self._format.trims,
        }
        (directory / _CODEC_FILE).write_text(json.dumps(description, indent=2) + "\n")

    def _decode_plain(self, ids: Sequence[int]) -> str:
        plain = [int(i) for i in ids if i not in self._special_ids and 0 <= i < self.vocab_size]
        return self._tokenizer.decode(plain, skip_special_tokens=False)


def train_codec(texts: Iterable[str], vocab_size: int, idioms: Sequence[str] = ()) -> Codec:
    """Trains a byte-level BPE on texts; the same texts give the same codec.

    Args:
      texts: the corpus.
      vocab_size: ids at most, specials and the 256 bytes included; fewer if the corpus runs out of merges.
      idioms: regular expressions, most urgent first, for stretches of text that may grow into one token
        although they span words: what a language makes everybody write ("; ++i) {"). They shorten sequences
        where there is nothing to decide, and leave the rest to word-sized pieces.

    Raises:
      ValueError: if vocab_size has no room for the bytes and the specials.
    """
    smallest = 256 + len(SPECIALS)
    if vocab_size < smallest:
        raise ValueError(
            f"train_codec: vocab_size is {vocab_size}; bytes and special tokens alone take {smallest}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join([*idioms, _PIECES])), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # The specials take the ids after the BPE's own and are never told to the tokenizer, which therefore
    # cannot find them in text.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    first_id = tokenizer.get_vocab_size()
    specials = {name: first_id + i for i, name in enumerate(SPECIALS)}
    return Codec(tokenizer, specials, OWN_FORMAT, eos="<eos>", pad="<pad>")


def hf_codec(path: str | Path) -> Codec:
    """The codec of a published ChatML model (SmolLM2, Qwen3) from its tokenizer.json, and its own chat template, where there is one.

    Args:
      path: that file, or the directory that holds it (and tokenizer_config.json or chat_template.jinja).

    Raises:
      FileNotFoundError: if it is not there.
      ValueError: if the model has no <|im_start|> and <|im_end|>, or a chat template that can't be used.
    """
    path = Path(path)
    file = path / _TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} does not exist; give a tokenizer.json or the directory that holds one"
        )
    description: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    added = description.pop("added_tokens", [])
    # Without added tokens and post-processing the tokenizer sees text only; templates such as a leading <bos>
    # are TurnFormat's business.
    description |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    return chatml_codec(
        Tokenizer.from_str(json.dumps(description)),
        specials={token["content"]: token["id"] for token in added if token["special"]},
        plain_additions={token["content"]: token["id"] for token in added if not token["special"]},
        **_own_template(file.parent),
    )


def _own_template(directory: Path) -> dict[str, Any]:
    """A checkpoint's chat template and the tokens that it names, as arguments of `chatml_codec`."""
    config = directory / "tokenizer_config.json"
    about = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    template, names = about.get("chat_template"), {}
    if isinstance(template, list):  # several by name
        template = next((one["template"] for one in template if one["name"] == "default"), None)
    if (file := directory / "chat_template.jinja").is_file():
        template = file.read_text(encoding="utf-8")
    for name in ("bos_token", "pad_token", "unk_token"):
        if token := about.get(name):
            names[name] = token["content"] if isinstance(token, dict) else token
    return {"template": template, "names": names}


def chatml_codec(
    tokenizer: Tokenizer,
    specials: Mapping[str, int],
    plain_additions: Mapping[str, int] | None = None,
    template: str | None = None,
    names: dict[str, str] | None = None,
) -> Codec:
    """A codec of a model that speaks ChatML, over a tokenizer without added tokens.

    Args:
      tokenizer, specials, plain_additions: as of `Codec`.
      template: the model's chat template; without one, turns are plain ChatML.
      names: further variables of the template.

    Raises:
      ValueError: a model without ChatML's tokens, a template that can't be used.
    """
    pad = "<|endoftext|>" if "<|endoftext|>" in specials else "<|im_end|>"
    form = turn_format(template, specials, "<|im_end|>", names) if template and "<|im_end|>" in specials else CHATML_FORMAT
    return Codec(tokenizer, specials, form, eos="<|im_end|>", pad=pad, plain_additions=plain_additions)


def load_codec(directory: str | Path) -> Codec:
    """Reads what `Codec.save` wrote."""
    directory = Path(directory)
    for name in (_TOKENIZER_FILE, _CODEC_FILE):
        if not (directory / name).is_file():
            raise FileNotFoundError(
                f"{directory / name} does not exist; give a directory that Codec.save wrote"
            )
    about = json.loads((directory / _CODEC_FILE).read_text())
    return Codec(
        Tokenizer.from_file(str(directory / _TOKENIZER_FILE)),
        about["specials"],
        TurnFormat(first=tuple(about["first"]), later=tuple(about["later"]), trims=about.get("trims", False)),
        eos=about["eos"],
        pad=about["pad"],
        plain_additions=about["plain_additions"],
    )


def _looks_special(piece: str) -> bool:
    return piece.startswith("<") and piece.endswith(">")
