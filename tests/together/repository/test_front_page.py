"""README and the pages say what there is: figures are those of the tables, and pages are found by the field's words."""

import json
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RUN = json.loads((ROOT / "docs" / "assets" / "performance.json").read_text(encoding="utf-8"))
FIGURES = {(each["what"], each["yardstick"]): each["median"] for each in RUN["results"]}


def figure(measured, yardstick):
    (found,) = [
        ratio for (what, whose), ratio in FIGURES.items() if what.startswith(measured) and whose.startswith(yardstick)
    ]
    return f"{found:.2f}"


LLAMA = "Llama 25M, fp32"


@pytest.mark.parametrize(
    ("peer", "claim", "figures"),
    [
        ("Accelerate", "DDP: {} times as long as Accelerate's", [(f"step of the DDP plugin, {LLAMA}", "Accelerate")]),
        (
            "DeepSpeed",
            "ZeRO-1: {} times as long as DeepSpeed's",
            [(f"step of the ZeRO plugin, stage 1, {LLAMA}", "DeepSpeed")],
        ),
        (
            "FSDP2 by hand",
            "`fsdp`: {}, `gemini`: {} times as long as `fully_shard`; `gemini` takes {} times its memory",
            [
                (f"step of the FSDP plugin, {LLAMA}", "fully_shard"),
                (f"step of the Gemini plugin, {LLAMA}", "fully_shard"),
                (f"peak memory of the Gemini plugin, {LLAMA}", "fully_shard"),
            ],
        ),
        (
            "transformers' `DistributedConfig`",
            (
                "tensor parallelism: {} and {} times as long as DTensor's, in {} and {} times its memory ({} in bf16); "
                "experts: {} times as long"
            ),
            [
                ("tp=2, Llama of 6 layers, hidden 384, fp32", "parallelize_module"),
                ("tp=2, Llama of 6 layers, hidden 1024, fp32", "parallelize_module"),
                ("peak memory, tp=2, Llama of 6 layers, hidden 384, fp32", "parallelize_module"),
                ("peak memory, tp=2, Llama of 6 layers, hidden 1024, fp32", "parallelize_module"),
                ("peak memory, tp=2, Llama of 6 layers, hidden 1024, bf16", "parallelize_module"),
                ("ep=2", "transformers' AllToAllEP"),
            ],
        ),
    ],
)
def test_figures_of_peers_are_those_of_the_results(peer, claim, figures):
    (row,) = [line for line in README.splitlines() if line.startswith(f"| {peer} |")]
    assert row.split(" | ")[-1].rstrip(" |") == claim.format(*(figure(*each) for each in figures))


def test_the_status_is_that_of_the_report_from_a_gpu():
    report = json.loads((ROOT / "docs" / "assets" / "gpu-report.json").read_text(encoding="utf-8"))
    passed = sum(case["status"] == "passed" for case in report["cases"])
    card = report["machine"]["card"].split()[1]
    assert f"One {card} ran {passed} of {len(report['cases'])} cases" in README.replace("\n", " ")


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_script_is_a_plain_loop_with_five_more_lines(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    diff = re.search(r"```diff\n(.*?)```", text, re.DOTALL)[1].splitlines()
    script = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1].splitlines()
    assert [line[1:] for line in diff if not line.startswith("-")] == script[:-1]
    assert [sum(line.startswith(sign) for line in diff) for sign in "+-"] == [5, 2]
    compile("\n".join(line[1:] for line in diff if not line.startswith("+")), "the plain loop", "exec")


def test_the_image_runs_the_commands_of_the_readme():
    first, second = re.search(r"^(python -m pip install nox) && (nox -s demo)$", README, re.MULTILINE).groups()
    steps = dict(line.split(" ", 1) for line in (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines())
    assert steps["RUN"] == f"{first} && {second} --install-only"
    assert json.loads(steps["CMD"]) == [*shlex.split(second), "-R"]  # what RUN has installed, without a network


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("FP8", "low-bits"),
        ("EMA", "checkpoints"),
        ("HSDP", "plugins/fsdp"),
        ("MoE", "experts"),
        ("gradient checkpointing", "saving-memory"),
        ("context", "long-sequences"),
        ("ring attention", "long-sequences"),
        ("Streaming", "streaming"),
        ("IterableDataset", "streaming"),
        ("MFU", "watching-a-run"),
        ("QLoRA", "lora"),
        ("DPO", "trainer"),
        ("GRPO", "trainer"),
        ("vLLM", "serving"),
        ("OOM", "saving-memory"),
        ("Deterministic", "debugging"),
        ("elastic", "fault-tolerance"),
        ("zero bubble", "plugins/hybrid"),
    ],
)
def test_a_word_of_the_field_is_in_a_page_s_title_or_first_paragraph(word, page):
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    title, first = [part for part in text.split("\n\n") if not part.startswith("---")][:2]
    assert word.lower() in f"{title} {first}".replace("\n", " ").lower()
    terms = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").lower()
    assert word.lower() in terms


def test_errors_that_the_page_lists_are_raised_somewhere():
    texts = (path.read_text(encoding="utf-8") for path in ROOT.glob("packages/*/src/**/*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", "\n".join(texts))  # a message is written over several lines
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    cells = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ") and " ... " in line]
    words = [words.strip() for cell in cells for _, words in re.findall(r"(`+)(.+?)\1(?!`)", cell)]
    assert len(words) > 15
    assert [each for each in words if each not in joined] == []
