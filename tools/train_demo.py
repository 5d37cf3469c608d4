"""Train the shipped demo models: one command, resumable stage by stage.

    pip install -r tools/demo_training/requirements.txt
    python tools/train_demo.py --work-dir /tmp/demo

A stage that is stopped goes on from its last checkpoint when it is run again.
"""

import argparse
import os
from pathlib import Path

STAGES = ("corpus", "tokenizer", "trunk", "sample", "head", "draft", "export", "measure")
MODELS = Path(__file__).resolve().parents[1] / "src" / "mlx_rewind" / "models"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True, help="texts, checkpoints, samples")
    parser.add_argument("--stage", choices=("all", *STAGES), default="all")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--models-dir", type=Path, default=MODELS, help="where export writes")
    parser.add_argument("--trunk-steps", type=int, default=2400)
    parser.add_argument("--head-steps", type=int, default=400)
    parser.add_argument("--draft-steps", type=int, default=900)
    parser.add_argument("--sequences", type=int, default=2560, help="sampled from the target")
    return parser.parse_args()


def run_stage(stage: str, args: argparse.Namespace) -> None:
    """Import late, so that `--help` and the early stages do without torch."""
    work: Path = args.work_dir
    if stage == "corpus":
        from demo_training import corpus

        corpus.build(work)
    elif stage == "tokenizer":
        from demo_training import data, tokenizer

        tokenizer.build(work)
        data.build(work)
    elif stage == "export":
        from demo_training import export

        export.build(work, args.models_dir)
    elif stage == "measure":
        from demo_training import measure

        measure.report(work, args.models_dir / "prompts.jsonl")
    else:
        train_stage(stage, args)


def train_stage(stage: str, args: argparse.Namespace) -> None:
    import torch
    from demo_training import distil, sample, train

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if stage == "trunk":
        train.train_trunk(args.work_dir, args.trunk_steps)
    elif stage == "sample":
        sample.build(args.work_dir, args.sequences)
    elif stage == "head":
        distil.train_head(args.work_dir, args.head_steps)
    elif stage == "draft":
        distil.train_draft(args.work_dir, args.draft_steps)


def main() -> None:
    args = parse_arguments()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    for stage in STAGES if args.stage == "all" else (args.stage,):
        print(f"== {stage}", flush=True)
        run_stage(stage, args)


if __name__ == "__main__":
    main()
