"""The matrix once more under OpenBLAS, which rounds a row differently alone and in a window.

The rehearsal for GPUs: equality of tokens, under the margin guard. OpenBLAS has to be there when
the process starts, so each test runs this file as a program with the library preloaded.
"""

import os
import subprocess
import sys

import pytest

SHARES = 4


@pytest.mark.skipif(sys.platform != "linux", reason="MLX has its own BLAS here")
@pytest.mark.parametrize("share", range(SHARES))
def test_tokens_are_those_of_plain_decoding(share: int) -> None:
    from mlx_rewind.bench.blas import find_openblas  # not in the program: see `main`

    library = find_openblas()
    if library is None:
        pytest.skip("OpenBLAS is missing (Debian: apt-get install libopenblas0-pthread)")
    settings = {"LD_PRELOAD": library, "OPENBLAS_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, __file__, str(share)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "models with the tokens of plain decoding" in run.stdout


def main(share: int) -> None:
    import mlx.core as mx

    mx.set_default_device(mx.cpu)

    import zoo
    from mlx_rewind import generate_step
    from mlx_rewind.target import row_invariant

    assert not row_invariant(), "OpenBLAS is not in use"
    names = sorted(zoo.CONFIGS.keys() - zoo.REFUSED)[share::SHARES]
    plan, prompt = [3, None, 0, 7, 1, 6, 0, 2, 5, None, 4], zoo.PROMPTS[1]
    wrong = []
    for name in names:
        model = zoo.build(name)
        expected = zoo.reference(model, prompt, 64).tokens
        drafter = zoo.Scripted(expected, plan, prompt_length=len(prompt))
        steps = generate_step(prompt, model, drafter=drafter, num_draft_tokens=7, max_tokens=64)
        try:
            tokens = [token for token, *_ in steps]
        except AssertionError as error:  # the drafter saw the text leave its reference
            wrong.append(f"{name}: {error}")
        else:
            assert tokens == expected
    assert not wrong, "\n".join(wrong)
    print(f"{len(names)} models with the tokens of plain decoding")


if __name__ == "__main__":
    main(int(sys.argv[1]))
