"""Reference logits of tiny Hugging Face models: `python -m tools.make_hf_golden [CASE ...]`.

Needs torch and transformers. Writes the checkpoints that ``tests/kit/hf.py`` describes into a temporary
folder, lets transformers read them, and stores ``config.json`` and the logits of some positions in
``tests/golden_hf/NAME.npz``, and in ``vectors.npz`` what comes out of some at the last token of some texts,
which is how models embed, and in ``scores.npz`` the probabilities of rerankers. With cases it stores the
logits of these alone. With ``--llama-cpp DIR``, llama.cpp's sources, it lets their converter make a GGUF file
of each instead, or of the cases, and says where those differ from what the tests write.
"""

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import numpy.typing as npt
import torch
import transformers
from gguf import GGUFReader
from PIL import Image
from tokenizers import Tokenizer  # noqa: TID251 - as rerankers' cards do it
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.kit import assistants, rerankers, seeing, seeing_lfm2, seeing_qwen
from tests.kit.gguf import TinyGGUF
from tests.kit.gguf_cases import GGUF_CASES, gguf_of
from tests.kit.hf import (
    CASES,
    EMBEDDED,
    EMBEDDERS,
    ROWS,
    TOKENS,
    config_of,
    shapes,
    weights,
    write_checkpoint,
    write_directory,
    write_with_tower,
)
from tests.kit.tokenizers import byte_level_json

OUT = Path(__file__).parents[1] / "tests/golden_hf"


def logits(folder: Path) -> npt.NDArray[np.float32]:
    """What transformers computes in float32 for TOKENS, at the positions of ROWS.

    Raises:
        SystemExit: transformers found other tensors than it expected.
    """
    sees = transformers.AutoConfig.from_pretrained(folder).model_type == "muse_glimmer"
    auto = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    model, info = auto.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    unread = {key: sorted(name for name in names if "vision" not in name) for key, names in info.items()}
    wrong = {key: names for key, names in unread.items() if names}
    if wrong:
        raise SystemExit(f"{folder.name}: {wrong}")
    if folder.name == "nanbeige":  # whose last norm also stands between its runs
        layers = model.model.layers
        layers[len(layers) // 2].register_forward_pre_hook(lambda _, args: (model.model.norm(args[0]),))
    with torch.no_grad():
        result = model.eval()(input_ids=torch.tensor([TOKENS]), use_cache=False).logits
    rows: npt.NDArray[np.float32] = result[0, list(ROWS)].numpy()
    return rows


def as_published(folder: Path, config: dict[str, Any]) -> Path:
    """A directory of which transformers computes what a model's publishers do.

    Files of LFM3 call a rotation of half the pairs "default", and transformers then turns all of them. It has
    no Nanbeige: a Llama with every layer twice stands for it. Of Muse Glimmer it reads the whole model alone.
    """
    kind = config["model_type"]
    if kind == "lfm3":
        full = config["rope_parameters"]["full_attention"] | {"rope_type": "proportional"}
        config = config | {"rope_parameters": config["rope_parameters"] | {"full_attention": full}}
    elif kind == "nanbeige":
        layers, tensors = config["num_hidden_layers"], weights(config)
        twice = {
            name.replace(f"layers.{layer}.", f"layers.{layer + layers}."): values
            for name, values in tensors.items()
            for layer in range(layers)
        }
        config = config | {"model_type": "llama", "num_hidden_layers": 2 * layers}
        return write_directory(folder, config, tensors | twice)
    elif kind == "muse_glimmer_text":
        small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
        outer = {"model_type": "muse_glimmer", "text_config": config, "vision_config": small}
        return write_with_tower(folder, config, outer, ())
    return write_checkpoint(folder, config)


def store(folder: Path, cases: Iterable[str] = CASES) -> None:
    """Write one file for each case."""
    OUT.mkdir(exist_ok=True)
    for case in cases:
        rows = logits(as_published(folder / case, config_of(case)))
        config, names = json.dumps(config_of(case), sort_keys=True), names_of(case)
        np.savez_compressed(OUT / f"{case}.npz", config=config, logits=rows, **names)
        print(f"{case}: std {rows.std():.3f}, transformers {transformers.__version__}")


def names_of(case: str) -> dict[str, Any]:
    """The tensors of a directory, which transformers found, and those of a GGUF file."""
    gguf = sorted(gguf_of(case).tensors) if case in GGUF_CASES else []
    return {"tensors": sorted(shapes(config_of(case))), "gguf_tensors": gguf}


def vectors(folder: Path) -> npt.NDArray[np.float32]:
    """What transformers computes in float32 for the last token of each of EMBEDDED, to length 1."""
    model = transformers.AutoModel.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        rows = [model(input_ids=torch.tensor([text])).last_hidden_state[0, -1] for text in EMBEDDED]
    normalized: npt.NDArray[np.float32] = torch.nn.functional.normalize(torch.stack(rows), dim=-1).numpy()
    return normalized


def store_vectors(folder: Path) -> None:
    """Write one file for all cases."""
    checkpoints = {case: write_checkpoint(folder / case, config_of(case)) for case in EMBEDDERS}
    vectors_by_case: dict[str, Any] = {case: vectors(path) for case, path in checkpoints.items()}
    np.savez_compressed(OUT / "vectors", **vectors_by_case)


def store_scores(folder: Path) -> None:
    """Write the probabilities of a query's texts that rerankers compute, as their model cards do it."""
    found: dict[str, Any] = {}
    for kind in rerankers.KINDS:
        path = rerankers.write_reranker(folder, kind)
        core = Tokenizer.from_file(str(path / "tokenizer.json"))
        auto = transformers.AutoModelForCausalLM
        if kind == "head":
            auto = transformers.AutoModelForSequenceClassification
        model = auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()

        def ids(text: str, encoder: Tokenizer = core) -> list[int]:
            return list(encoder.encode(text, add_special_tokens=False).ids)

        rows = []
        for text in rerankers.DOCUMENTS:
            if kind == "head":
                tokens = list(core.encode(rerankers.QUERY, text).ids)
            else:
                pair = rerankers.PAIR.format(rerankers.INSTRUCTION, rerankers.QUERY, text)
                tokens = [*ids(rerankers.PREFIX), *ids(pair), *ids(rerankers.SUFFIX)]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([tokens])).logits[0]
            if kind == "head":
                rows.append(torch.sigmoid(logits[0]))
            else:
                words = [*ids("no"), *ids("yes")]
                rows.append(torch.softmax(logits[-1, words], dim=0)[1])
        found[kind] = torch.stack(rows).numpy()
        print(f"{kind}: {found[kind]}")
    np.savez_compressed(OUT / "scores", **found)


def store_assistants(folder: Path) -> None:
    """Write what assistants of Gemma 4 make of texts and of tokens behind them, with clusters and without.

    The target reads the last token but one in a pass of its own: then transformers hands out as many keys of
    windowed layers as a window has. Logits and states are ``[texts, tokens, ...]``; with clusters, logits of
    those that are not read are NaN.
    """
    found: dict[str, Any] = {}
    target = transformers.AutoModelForCausalLM.from_pretrained(
        assistants.write_target(folder / "target"), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for name, clustered in (("clustered", True), ("whole", False)):
        head = transformers.Gemma4AssistantForCausalLM.from_pretrained(
            assistants.write(folder / name, assistants.config(clustered=clustered)),
            dtype=torch.float32,
            attn_implementation="eager",
        ).eval()
        rows = [chain(target, head, text) for text in assistants.texts()]
        found[f"{name}_logits"], found[f"{name}_states"] = map(np.stack, zip(*rows, strict=True))
        print(f"{name}: std {np.nanstd(found[f'{name}_logits']):.3f}")
    small = {key: values.astype(np.float16) for key, values in found.items()}
    np.savez_compressed(OUT / "assistants", **small)


def chain(target: Any, head: Any, text: list[int]) -> tuple[Any, Any]:
    """Logits and states of an assistant, behind ``text`` and tokens that it is given as its drafts."""
    found, more = [], {"return_shared_kv_states": True, "output_hidden_states": True}
    with torch.no_grad():
        cache = target(torch.tensor([text[:-2]])).cache if text[:-2] else None
        known = target(torch.tensor([text[-2:-1]]), cache=cache, **more)
        state = known.hidden_states[-1][:, -1:]
        for token in (text[-1], *assistants.DRAFTED[:-1]):
            embedded = target.get_input_embeddings()(torch.tensor([[token]]))
            out = head(
                inputs_embeds=torch.cat([embedded, state], -1),
                position_ids=torch.tensor([[len(text) - 1]]),
                shared_kv_states=known.shared_kv_states,
            )
            logits, state = out.logits[0, 0].clone(), out.last_hidden_state
            if head.config.use_ordered_embeddings:
                logits[logits == logits.min()] = torch.nan
            found.append((logits.numpy(), state[0, 0].numpy()))
    return tuple(map(np.stack, zip(*found, strict=True)))  # type: ignore[return-value]


def store_seeing(folder: Path, kind: str) -> None:
    """Write what a tiny Gemma 4 makes of pictures and of prompts with them.

    For each picture the vectors. For each prompt its tokens, with markers as its processor writes them, the
    logits behind it, and tokens of the most likely answer with the lead of each.
    """
    path, found = seeing.write(folder / kind, kind), dict[str, Any]()
    unified = kind == "embedder"
    auto: Any = getattr(transformers, f"Gemma4{'Unified' * unified}ForConditionalGeneration")
    model, info = auto.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {key: sorted(names) for key, names in info.items() if names}
    if wrong:
        raise SystemExit(f"{kind}: {wrong}")
    towers, core = {"vectors": model.eval()}, Tokenizer.from_file(str(path / "tokenizer.json"))
    module: Any = importlib.import_module("transformers.models.gemma4.image_processing_pil_gemma4")
    patch = model.config.vision_config.patch_size
    whole = {"patch_size": 3 * patch, "pooling_kernel_size": 1}  # squares that are merged already
    given = whole if unified else {"patch_size": patch}
    processor = module.Gemma4ImageProcessorPil(max_soft_tokens=70, **given)
    seen = [processor(images=[seeing.picture(n)], return_tensors="pt") for n in range(len(seeing.SIZES))]
    counts = [int(picture["num_soft_tokens_per_image"][0]) for picture in seen]
    if kind == "seeing":
        other = seeing.write(folder / "other", kind, **seeing.OTHER)
        towers["other"] = auto.from_pretrained(other, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for number, picture in enumerate(seen):
            for name, tower in towers.items():
                made = tower.get_image_features(picture["pixel_values"], picture["image_position_ids"])
                found[f"{name}_{number}"] = made.pooler_output[0][: counts[number]].numpy()
    names = "pixel_values", "image_position_ids"
    pixels = [{name: picture[name] for name in names} for picture in seen]
    print(kind)
    np.savez_compressed(OUT / kind, **found | answers(model, core, seeing, pixels, counts))


def store_seeing_lfm2(folder: Path) -> None:
    """The same of a tiny LFM2-VL, whose processor needs torchvision: its sizes count here, not its pixels."""
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        sys.modules.setdefault(name, MagicMock())
    place = "transformers.models.lfm2_vl.image_processing_lfm2_vl"
    kind: Any = importlib.import_module(place).Lfm2VlImageProcessor
    processor, found = object.__new__(kind), dict[str, Any]()
    path = seeing_lfm2.write(folder / "lfm2")
    model, info = transformers.Lfm2VlForConditionalGeneration.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {key: sorted(names) for key, names in info.items() if names}
    if wrong:
        raise SystemExit(f"lfm2: {wrong}")
    model, core = model.eval(), Tokenizer.from_file(str(path / "tokenizer.json"))
    sizes = {"downsample_factor": 2, "max_image_tokens": 256, "encoder_patch_size": 16}
    seen, texts = list[Any](), list[str]()
    for number in range(len(seeing_lfm2.SIZES)):
        image = Image.fromarray(seeing_lfm2.picture(number))
        (wide, high), views, text = image.size, list[Image.Image](), ""
        small = processor.smart_resize(high, wide, min_image_tokens=64, **sizes)
        if processor._is_image_too_large(high, wide, max_pixels_tolerance=2.0, **sizes):
            columns, rows, *whole, _ = processor._get_grid_layout(high, wide, 2, 10, 512)
            resized = image.resize(tuple(whole), Image.Resampling.BILINEAR)
            for row in range(rows):
                for column in range(columns):
                    left, top = 512 * column, 512 * row
                    views.append(resized.crop((left, top, left + 512, top + 512)))
                    text += f"<|img_row_{row + 1}_col_{column + 1}|>" + "<image>" * 256
            text += "<|img_thumbnail|>"
        views.append(image.resize(small, Image.Resampling.BILINEAR))
        texts.append(f"<|image_start|>{text}{'<image>' * (small[0] * small[1] // 1024)}<|image_end|>")
        grids = [(view.height // 16, view.width // 16) for view in views]
        values = torch.zeros(len(views), 1024, 768)
        mask = torch.zeros(len(views), 1024, dtype=torch.int32)
        for at, (view, (rows, columns)) in enumerate(zip(views, grids, strict=True)):
            pixels = torch.tensor(np.asarray(view), dtype=torch.float32) / 127.5 - 1
            squares = pixels.reshape(rows, 16, columns, 16, 3).transpose(1, 2).reshape(rows * columns, 768)
            values[at, : len(squares)], mask[at, : len(squares)] = squares, 1
        shapes = torch.tensor(grids)
        seen.append({"pixel_values": values, "spatial_shapes": shapes, "pixel_attention_mask": mask})
        with torch.no_grad():
            made = model.get_image_features(**seen[-1])
        found[f"vectors_{number}"] = torch.cat(list(made.pooler_output)).numpy()
    layouts = list[tuple[int, ...]]()
    for high, wide in seeing_lfm2.OTHERS:
        large = processor._is_image_too_large(high, wide, max_pixels_tolerance=2.0, **sizes)
        grid = processor._get_grid_layout(high, wide, 2, 10, 512)[:2] if large else (1, 1)
        layouts.append((*grid, *processor.smart_resize(high, wide, min_image_tokens=64, **sizes)))
    found["layouts"] = np.array(layouts)
    for number, prompt in enumerate(seeing_lfm2.PROMPTS):
        order = [part for part in prompt if isinstance(part, int)]
        text = "".join(texts[part] if isinstance(part, int) else part for part in prompt)
        tokens = core.encode(f"<turn>user\n{text}<turn>", add_special_tokens=False).ids
        given = {key: torch.cat([seen[n][key] for n in order]) for key in seen[0]}
        leads, answer, ids = list[float](), list[int](), list(tokens)
        for _ in range(seeing_lfm2.NEW):
            with torch.no_grad():
                row = model(input_ids=torch.tensor([ids]), **given, use_cache=False).logits[0, -1].clone()
            if not answer:
                found[f"logits_{number}"] = row.numpy().copy()
            row[[seeing_lfm2.EOS, seeing_lfm2.MARKER]] = -torch.inf
            best = row.topk(2)
            leads.append(float(best.values[0] - best.values[1]))
            answer.append(int(best.indices[0]))
            ids.append(answer[-1])
        found |= {f"tokens_{number}": tokens, f"answer_{number}": answer, f"leads_{number}": leads}
        print(f"lfm2 {number}: {len(tokens)} tokens, least lead {min(leads):.4f}, {answer}")
    np.savez_compressed(OUT / "seeing_lfm2", **found)


def answers(
    model: Any, core: Tokenizer, kit: Any, seen: list[dict[str, Any]], counts: list[int]
) -> dict[str, Any]:
    """What a model makes of ``kit.PROMPTS``, with pictures as the model takes them and rows of each."""
    found = dict[str, Any]()
    begin, marker, end = kit.SPECIALS[kit.BEGIN : kit.END + 1]
    for number, prompt in enumerate(kit.PROMPTS):
        text, order = "", [part for part in prompt if isinstance(part, int)]
        for part in prompt:
            text += part if isinstance(part, str) else begin + marker * counts[part] + end
        tokens = core.encode(f"<turn>user\n{text}<turn>", add_special_tokens=False).ids
        pixels = {key: torch.cat([seen[n][key] for n in order]) for key in seen[0]}
        leads, answer, ids = list[float](), list[int](), list(tokens)
        for _ in range(kit.NEW):
            types = torch.tensor([[int(id_ == kit.MARKER) for id_ in ids]])
            given = {"input_ids": torch.tensor([ids]), "mm_token_type_ids": types, **pixels}
            with torch.no_grad():
                row = model(**given, use_cache=False).logits[0, -1]
            if not answer:
                found[f"logits_{number}"] = row.numpy()
            row = row.clone()
            row[[kit.EOS, kit.MARKER]] = -torch.inf  # which the test's answers do not have
            best = row.topk(2)
            leads.append(float(best.values[0] - best.values[1]))
            answer.append(int(best.indices[0]))
            ids.append(answer[-1])
        found |= {f"tokens_{number}": tokens, f"answer_{number}": answer, f"leads_{number}": leads}
        print(f"prompt {number}: {len(tokens)} tokens, least lead {min(leads):.4f}, {answer}")
    return found


def store_seeing_qwen(folder: Path) -> None:
    """Write the same of a tiny Qwen3.5, with every third vector of a picture."""
    path, found = seeing_qwen.write(folder / "seeing_qwen"), dict[str, Any]()
    model, info = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {key: sorted(names) for key, names in info.items() if names}
    if wrong:
        raise SystemExit(f"seeing_qwen: {wrong}")
    model, core = model.eval(), Tokenizer.from_file(str(path / "tokenizer.json"))
    module: Any = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    patch = model.config.vision_config.patch_size
    limits = {"shortest_edge": 64 * 4 * patch**2, "longest_edge": seeing_qwen.BUDGET * 4 * patch**2}
    half = [0.5] * 3
    processor = module.Qwen2VLImageProcessorPil(
        patch_size=patch, size=limits, image_mean=half, image_std=half
    )
    numbers = range(len(seeing_qwen.SIZES))
    seen = [dict(processor(images=[seeing_qwen.picture(n)], return_tensors="pt")) for n in numbers]
    counts = [int(picture["image_grid_thw"].prod()) // 4 for picture in seen]
    with torch.no_grad():
        for number, picture in enumerate(seen):
            made = model.get_image_features(picture["pixel_values"], picture["image_grid_thw"])
            found[f"vectors_{number}"] = made.pooler_output[0].numpy()[::3]
    found["sizes"] = [
        module.smart_resize(*shape, 2 * patch, 64 * 4 * patch**2, budget * 4 * patch**2)
        for budget in seeing_qwen.BUDGETS
        for shape in seeing_qwen.SHAPES
    ]
    found |= answers(model, core, seeing_qwen, seen, counts)
    for number, prompt in enumerate(seeing_qwen.PROMPTS):
        grids = torch.cat([seen[part]["image_grid_thw"] for part in prompt if isinstance(part, int)])
        ids = torch.tensor([found[f"tokens_{number}"]])
        places, _ = model.model.get_rope_index(ids, (ids == seeing_qwen.MARKER).int(), grids)
        found[f"positions_{number}"] = places[:, 0].T.numpy().astype(np.int16)
    np.savez_compressed(OUT / "seeing_qwen", **found)


def convert(llama_cpp: Path, source: Path, made: Path, *more: str) -> None:
    """Let llama.cpp's converter make a GGUF file in F32 of a directory whose tokenizer no model has."""
    if str(llama_cpp) not in sys.path:
        sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
        for name in [name for name in sys.modules if name.partition(".")[0] == "gguf"]:
            del sys.modules[name]  # the converter needs its own
        base: Any = importlib.import_module("conversion.base")
        base.TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
        base.TextModel._set_vocab_sentencepiece = base.TextModel._set_vocab_gpt2
        loaded = base.ModelBase.load_hparams

        def as_stated(folder: Path, *rest: Any, **more: Any) -> dict[str, Any]:
            config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            # transformers would add experts to a Nemotron-H that has none.
            return config if config["model_type"] == "nemotron_h" else loaded(folder, *rest, **more)

        base.ModelBase.load_hparams = as_stated
        for module, kind in (
            ("gemma", "Gemma4Model"),
            ("glm", "Glm4Model"),
            ("glm", "Glm4MoeLiteModel"),
            ("hunyuan", "HunYuanModel"),
            ("laguna", "LagunaModel"),
            ("muse_glimmer", "MuseGlimmerModel"),
        ):  # want tokens of their models
            family: Any = importlib.import_module(f"conversion.{module}")
            getattr(family, kind).set_vocab = base.TextModel._set_vocab_gpt2
    converter: Any = importlib.import_module("convert_hf_to_gguf")
    sys.argv = ["convert", str(source), "--outfile", str(made), "--outtype", "f32", *more]
    converter.main()


def compare(folder: Path, llama_cpp: Path, cases: Iterable[str]) -> None:
    """Say where the converter's files differ from the tests'."""
    for case in cases:
        config = config_of(case)
        if config["model_type"] == "lfm3":  # llama.cpp b11434 lacks it
            continue
        kind = config["model_type"]
        config["architectures"] = [_CLASSES.get(kind) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
        config.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
        if kind == "hunyuan_v1_dense":  # whose context the converter wants
            config["max_position_embeddings"] = 32_768
        source = write_checkpoint(folder / case, config)
        (source / "tokenizer.json").write_text(byte_level_json(size=316), encoding="utf-8")
        (source / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
        made = folder / f"{case}.gguf"
        convert(llama_cpp, source, made, *(["--no-mtp"] if "linear_num_key_heads" in config else []))
        print(f"{case}: {'; '.join(differences(gguf_of(case), made)) or 'the same'}")
    if "qwen35" in cases:
        source, made = seeing_qwen.write(folder / "seeing_qwen"), folder / "mmproj.gguf"
        convert(llama_cpp, source, made, "--mmproj")
        print(f"its tower: {'; '.join(differences(seeing_qwen.mmproj(), made)) or 'the same'}")


_CLASSES = {
    "nanbeige": "NanbeigeForCausalLM",
    "muse_glimmer_text": "MuseGlimmerForConditionalGeneration",
}


def compare_towers(folder: Path, llama_cpp: Path) -> None:
    """Say where the converter's files of towers differ from the tests'."""
    for kind in seeing.KINDS:
        source = seeing.write(folder / f"{kind}-tower", kind)
        facts = json.loads((source / "config.json").read_text())
        if kind == "embedder":  # it wants one of sound
            facts["audio_config"] = {"audio_embed_dim": 64}
        (source / "config.json").write_text(json.dumps(facts))
        told = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
        (source / "preprocessor_config.json").write_text(json.dumps(told))
        made = folder / f"mmproj-{kind}.gguf"
        convert(llama_cpp, source, made, "--mmproj")
        print(f"{kind}: {'; '.join(differences(seeing.mmproj(kind), made)) or 'the same'}")
    source, made = seeing_lfm2.write(folder / "lfm2-tower"), folder / "mmproj-lfm2.gguf"
    told = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (source / "preprocessor_config.json").write_text(json.dumps(told))
    convert(llama_cpp, source, made, "--mmproj")
    print(f"lfm2: {'; '.join(differences(seeing_lfm2.mmproj(), made)) or 'the same'}")


def differences(ours: TinyGGUF, made: Path) -> Iterator[str]:
    """What a converted file states otherwise than the tests' file, or not at all."""
    theirs = GGUFReader(made)
    for key, value in ours.metadata.items():
        if key.startswith(f"{ours.architecture}."):
            other: Any = key in theirs.fields and theirs.fields[key].contents()
            near = isinstance(value, float) and np.isclose(other, value, rtol=1e-6)
            if not near and other != value:
                yield f"{key} is {value}, there {other}"
    tensors = {tensor.name: tensor.data for tensor in theirs.tensors}
    yield from (f"only one has {name}" for name in tensors.keys() ^ ours.tensors.keys())
    for name in tensors.keys() & ours.tensors.keys():
        kind, raw = ours.tensors[name]
        values = raw if kind in ("I64", "MXFP4") else ours.values(name)
        if not np.allclose(tensors[name].ravel(), values.ravel(), rtol=1e-6):
            yield f"{name} has other values"


def main() -> None:
    """Store what transformers computes, or compare what llama.cpp's converter makes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--llama-cpp", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.llama_cpp is not None:
            compare(Path(folder), args.llama_cpp, args.cases or GGUF_CASES)
            compare_towers(Path(folder), args.llama_cpp)
        elif args.cases:
            store(Path(folder), args.cases)
        else:
            store(Path(folder))
            store_vectors(Path(folder))
            store_scores(Path(folder))
            store_assistants(Path(folder))
            for kind in seeing.KINDS:
                store_seeing(Path(folder), kind)
            store_seeing_lfm2(Path(folder))
            store_seeing_qwen(Path(folder))


if __name__ == "__main__":
    main()
