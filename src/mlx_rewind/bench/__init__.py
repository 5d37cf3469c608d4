"""What speculation gives on this machine, as ratios within one run: `mlx-rewind bench`.

blas.py      which BLAS computes, and a start with a better one
models.py    random hybrids, and a drafter that is right with probability p
record.py    a drafter watched: its guesses, its time, the rounds that came of them
measure.py   times of decoding, windows and commits, in turn, medians
memory.py    bytes that decoding keeps
trials.py    a drafter with a draft length; the ideal speed-up, tau / (1 + K (m + c))
run.py       all of it for one model
report.py    tables, JSON, and the verdict
plot.py      speed-up over draft length, with matplotlib
"""
