"""What answers cost other programs: ``python -m tools.manners [--model NAME] [--rounds 2] [--seconds 3]``.

How fast programs count, each in a session of its own, beside no answer, a normal and a low one; and tokens/s.
"""

import sys
from functools import partial
from statistics import median
from subprocess import PIPE, Popen
from threading import Event, Thread
from time import sleep

import edgespec
from tools.arguments import arguments

COUNTS = """
import sys, time
input()
count, end = 0, time.perf_counter() + float(sys.argv[1])
while time.perf_counter() < end: count += sum(1 for _ in range(2000))
print(count)
"""


def beside(model: edgespec.Model | None, programs: int, seconds: float) -> tuple[float, float]:
    """What ``programs`` count in ``seconds`` beside a model that answers, and its tokens/s."""
    tokens, over = list[int](), Event()

    def answer() -> None:
        while model is not None and not over.is_set():
            for record in model.stream("A binary tree", max_new_tokens=400, cancelled=over.is_set).records():
                tokens.append(len(record.tokens))

    (thread := Thread(target=answer)).start()
    run = partial(Popen[str], stdin=PIPE, stdout=PIPE, text=True, start_new_session=True)
    started = [run([sys.executable, "-c", COUNTS, str(seconds)]) for _ in range(programs)]
    sleep(1.0)  # until all are there, and the prompt is read
    before = sum(tokens)
    for child in started:
        print(file=child.stdin, flush=True)
    sleep(seconds)
    speed = (sum(tokens) - before) / seconds
    over.set()
    thread.join()
    return sum(int(child.communicate()[0]) for child in started), speed


def main() -> None:
    """Read the command line, print a table."""
    options = arguments(__doc__, model="qwen2.5-coder-1.5b-instruct", rounds=2, seconds=3.0)
    models = [None, *(edgespec.load(options.model, priority=priority) for priority in ("normal", "low"))]
    for programs in (1, 2, 0):
        runs = [[beside(model, programs, options.seconds) for model in models] for _ in range(options.rounds)]
        for name, results in zip(("none", "normal", "low"), zip(*runs, strict=True), strict=True):
            shares = (own / max(run[0][0], 1) for (own, _), run in zip(results, runs, strict=True))
            speed = median(speed for _, speed in results)
            print(f"{programs} programs, {name}: {median(shares):.3f}, {speed:.1f} tokens/s")


if __name__ == "__main__":
    main()
