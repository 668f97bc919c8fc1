"""How much better does a drafter guess on a user's later requests, when it was trained on the earlier ones?

Usage: ``python -m tools.user_gains TARGET --drafter NAME --answers ANSWERS.jsonl --ways turns,passages``

ANSWERS comes from ``edgespec align --answers-only`` for prompts of tools/user_streams.py, in order. The first
``--teach`` answers teach as a history would (docs/history.md), the next ``--measure`` measure: right first
guesses, and the speed of a replay. A way is ``turns`` or ``passages``, perhaps with passes and rate:
``turns:3:0.001``.
"""

import json
import tempfile
from contextlib import closing
from pathlib import Path

from edgespec.align.adapting import adapt, prices_of, speed
from edgespec.align.answers import read_answers
from edgespec.align.run import share, text_of, torch_device
from edgespec.history.changes import learner_of
from edgespec.history.memory import Delta
from edgespec.history.passages import Cutter, Turn
from edgespec.history.store import Scope, Store
from edgespec.loading.opening import open_model
from edgespec_export.align.settings import TrainingOptions
from edgespec_models.progress import show_progress
from tools.arguments import arguments


def main() -> None:
    """Train in each way and print a line for it."""
    args = arguments(
        __doc__, "target", drafter=str, answers=Path, ways="turns", threads=1, teach=150, measure=150
    )

    from edgespec_export.align.alignment import read_alignment  # with PyTorch, which --help does without
    from edgespec_export.align.decoder import TorchDecoder
    from edgespec_export.align.training import first_guesses
    from edgespec_export.sources.open import open_checkpoint

    torch_device("cpu", args.threads)
    target = open_model(args.target, "target")
    drafter, answers = open_model(args.drafter, "drafter", target=args.target), read_answers(args.answers)
    end = args.teach + args.measure
    later = [text for answer in answers[args.teach : end] if (text := text_of(answer, drafter)) is not None]
    for way in args.ways.split(","):
        kind, passes, rate = (way.split(":") + ["1", "1e-3"][len(way.split(":")) - 1 :])[:3]
        with tempfile.TemporaryDirectory() as folder:
            path, scope = Path(folder) / "user.history", Scope.of(target, "")
            delta = Delta()
            for answer in answers[: args.teach]:
                data, cutter = answer.text.encode(), Cutter()
                prompt = json.dumps([{"role": "user", "content": answer.prompt}]).encode()
                delta.turns += [Turn(prompt, data, answer.complete)] * (kind == "turns")
                for passage in (*cutter.push(target.tokenizer.encode_bytes(data)), *cutter.finish()):
                    delta.wrote(passage)
            with closing(Store.open(path)) as store:
                store.merge(scope, delta, target.tokenizer.bytes_of)
            learner, prices = learner_of(path, scope, drafter, args.drafter), prices_of(target, drafter)
            assert learner is not None
            options = TrainingOptions(passes=int(passes), rate=float(rate), batch_tokens=512)
            print(way, adapt(learner, prices, options=options, progress=show_progress), flush=True)
            for change in (learner.shipped, learner.change):
                if change is not None and change.is_file():
                    with open_checkpoint(learner.source) as checkpoint:
                        decoder = TorchDecoder(checkpoint)
                        decoder.load(read_alignment(change).parts)
                        guesses = first_guesses(decoder, later)
                    print(
                        f"{way} {change.name}: {len(later)} later texts, {sum(map(len, guesses)):,} tokens, "
                        f"right {share(guesses):.4f}, replayed {speed(guesses, prices):.3f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
