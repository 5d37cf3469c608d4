"""A drafter of your own: any object with `propose`. This one remembers earlier answers."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

import mlx_rewind


class Memory:
    """Proposes what followed the same three tokens when they were last seen, in any request."""

    def __init__(self) -> None:
        self.following: dict[tuple[int, ...], int] = {}

    def learn(self, tokens: list[int]) -> None:
        for i in range(3, len(tokens)):
            self.following[tuple(tokens[i - 3 : i])] = tokens[i]

    def propose(self, tokens: list[int], num_draft_tokens: int) -> list[int]:
        """`tokens` are prompt and emitted tokens. Fewer guesses than asked for are fine."""
        context, guesses = tokens[-3:], []
        while len(guesses) < num_draft_tokens:
            guess = self.following.get(tuple(context))
            if guess is None:
                break
            guesses.append(guess)
            context = [*context[1:], guess]
        return guesses


def decode(
    model: nn.Module, tokenizer: Any, prompt: list[int], drafter: Any = None
) -> tuple[list[int], mlx_rewind.GenerationResponse]:
    responses = list(
        mlx_rewind.stream_generate(model, tokenizer, prompt, drafter=drafter, max_tokens=40)
    )
    return [response.token for response in responses], responses[-1]


def main() -> None:
    model, tokenizer = mlx_rewind.load()
    # float32, for the comparison below: on a GPU a near-tie in bfloat16 may go either way.
    model.set_dtype(mx.float32)
    prompt = tokenizer.encode("And it came to pass in those days, that")
    plain, _ = decode(model, tokenizer, prompt)

    memory = Memory()
    for attempt in ("knows nothing", "has seen the answer"):
        tokens, last = decode(model, tokenizer, prompt, memory)
        assert tokens == plain
        memory.learn(prompt + tokens)
        print(
            f"drafter {attempt}: {last.draft_n_accepted}/{last.draft_n} accepted, "
            f"{last.mean_acceptance_length:.2f} tokens per step, tokens identical"
        )
    assert last.draft_n_accepted > 0
    assert last.draft_kind == "custom"


if __name__ == "__main__":
    main()
