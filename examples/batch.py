"""Several prompts at once: rows of one forward that accept different numbers of drafts.

An engine takes a fourth request while three are under way. Every text is compared with the one
that its prompt gives alone.
"""

import mlx_rewind

PROMPTS = ["import os\n", "In the beginning", "def main():", "The second chapter"]


def main() -> None:
    model, tokenizer = mlx_rewind.load()
    head = mlx_rewind.load_mtp(None, model)
    engine = mlx_rewind.Engine(model, tokenizer, max_rows=3)

    def submit(prompt: str) -> mlx_rewind.Handle:
        request = mlx_rewind.Request(tokenizer.encode(prompt), max_tokens=24, drafter=head)
        return engine.submit(request)

    handles = [submit(prompt) for prompt in PROMPTS[:3]]
    for output in engine:
        if len(handles) == 3 and output.handle is handles[0]:
            handles.append(submit(PROMPTS[3]))  # waits for a row, and joins

    same = True
    for prompt, handle in zip(PROMPTS, handles, strict=True):
        alone = mlx_rewind.generate(model, tokenizer, prompt, max_tokens=24)
        same &= handle.text == alone
        print(f"{prompt!r}: {handle.stats.mean_acceptance_length:.2f} tokens per step")
        print(f"    {handle.text!r}")
    print("identical to four runs alone" if same else "differs from the runs alone")


if __name__ == "__main__":
    main()
