"""A byte-level BPE tokenizer with Qwen's split pattern and chat markers."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from demo_training import corpus, tasks
from demo_training.config import MAX_POSITIONS, VOCAB_SIZE

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# The pre-tokenizer pattern of Qwen3.5: with another one transformers' Qwen3_5Tokenizer, which
# builds the splitter itself, would not split as tokenizer.json says.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}\n"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}\n"
    "{{- '<|im_start|>assistant\\n' -}}\n"
    "{%- endif -%}\n"
)
SAMPLE_CHARACTERS = 12_000_000


def chat(question: str, answer: str | None = None) -> str:
    """The text that the chat template makes of one exchange, open-ended without an answer."""
    opening = f"{START}user\n{question}{END}\n{START}assistant\n"
    return opening if answer is None else f"{opening}{answer}{END}\n"


def build(work: Path) -> None:
    """Train on a sample of the training split and write the tokenizer's files."""
    folder = work / "tokenizer"
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(work), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    print(f"tokenizer: {tokenizer.get_vocab_size()} entries")


def training_texts(work: Path) -> Iterator[str]:
    rng = random.Random(1)
    documents = [d for d in corpus.load(work) if not d.held_out]
    rng.shuffle(documents)
    seen = 0
    for document in documents:
        yield document.text
        seen += len(document.text)
        if seen > SAMPLE_CHARACTERS:
            break
    passages = tasks.collect_passages(documents)
    for _, question, answer in tasks.generate(passages, 3000, seed=2):
        yield question
        yield answer


def marker_id(encoder: Tokenizer, marker: str) -> int:
    token = encoder.token_to_id(marker)
    if token is None:
        raise ValueError(f"the tokenizer has no {marker}")
    return token


def end_ids(encoder: Tokenizer) -> list[int]:
    """Tokens that end a generation: the end of a message, the end of a text."""
    return [marker_id(encoder, END), marker_id(encoder, END_OF_TEXT)]


def load(work: Path) -> Tokenizer:
    return Tokenizer.from_file(str(work / "tokenizer" / "tokenizer.json"))
