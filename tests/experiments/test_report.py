"""The report is what the committed rows say, loads nothing, and each number has a macro."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import jinja2.meta
import pandas as pd
import pytest

from tests.conftest import committed_tree
from workbench.experiments import claims as judged
from workbench.experiments import report, sensitivity
from workbench.experiments.settings import RECORDED, REPLAYED
from workbench.plots import FIGURES

TEMPLATE = Path(report.__file__).with_name("report.html").read_text()

ROOT = Path(__file__).parents[2]
FOLDER, REPORTS = committed_tree() / "figures", committed_tree() / "reports"
PLAIN, FLOWING = ("static", "none"), ("marginal_value", "none")
EVERYTHING = ("marginal_value", "all")
ENGINES = ("tectonic", "pdflatex", "lualatex", "xelatex")
ONE, ALL = (0.3, 0.3), (0.08, 0.5)  # intervals of shares


@pytest.fixture(scope="module")
def drawn() -> report.Drawn:
    return report.Drawn(FOLDER)


def test_what_is_committed_is_what_the_rows_say(drawn) -> None:
    """The page, its numbers and its tables: `workbench figures --replot` writes them anew."""
    numbers = report.made_of(drawn, report.PARTS)
    assert (REPORTS / "study.html").read_text() == report.page(drawn, numbers)
    assert (REPORTS / "numbers.tex").read_text() == report.numbers_tex(numbers)
    tables = report.made_of(drawn, report.TABLES)
    others = {"setting", "memory_parts", "ablation", "techniques", "missing_values", "verdicts"}
    assert set(tables) == {"models", "claims", "strategies", *others}
    for name, table in tables.items():
        assert (REPORTS / f"{name}.tex").read_text() == report.booktabs(name, table)


def test_every_number_of_the_prose_is_a_macro_and_every_macro_is_quoted(drawn) -> None:
    """No part is left out of the committed report, and no number stands in it by hand."""
    numbers = report.made_of(drawn, report.PARTS)
    assert set(numbers) == set(report.PARTS)
    names = [name for own in numbers.values() for name in own]
    parsed = jinja2.Environment().parse(TEMPLATE)
    quoted = jinja2.meta.find_undeclared_variables(parsed)
    others = {"told", "figure", "is_drawn", "table", "verdict", "verdicts", "parameters"}
    assert sorted(names) == sorted(quoted - others)
    defined = re.findall(r"\\newcommand\{\\(\w+)\}", (REPORTS / "numbers.tex").read_text())
    texts = {report.macro(name): text for own in numbers.values() for name, text in own.items()}
    assert len(defined) == len(set(defined)) and set(texts) <= set(defined)
    values = dict(re.findall(r"\\newcommand\{\\(\w+)\}\{(.*)\}", report.numbers_tex(numbers)))
    assert values["wbTinyLost"].startswith(values["wbTinyLostA"]) and "wbProblemsA" not in values
    for name in set(values) - set(texts):  # a number of a text whose name it goes on from
        text = next(t for n, t in texts.items() if re.fullmatch(rf"{n}[A-Z]{{1,2}}", name))
        assert re.fullmatch(r"[+-]?[\d,.]+", values[name]) and values[name] in text
    assert all(name.isascii() and name.isalpha() for name in defined), "TeX reads letters alone"


def test_the_page_needs_nothing_beside_it_and_shows_every_figure_it_names(drawn) -> None:
    page = (REPORTS / "study.html").read_text()
    loaded = re.findall(r'(?:src|href)="([^"]{0,40})', page) + re.findall(r"url\(", page)
    assert loaded and all(each.startswith(("data:image/svg+xml;base64,", "#")) for each in loaded)
    assert "<script" not in page and "<link" not in page
    shown = re.findall(r'<figure id="(\w+)">', page)
    asked = re.findall(r'figure\("(\w+)"\)', TEMPLATE)
    assert shown == asked and set(shown) <= set(FIGURES)
    numbered = re.findall(r"<b>Figure (\d+), (\w+)\.</b> <span class=\"finding\">(.{20})", page)
    assert [(int(n), name) for n, name, _ in numbered] == list(enumerate(asked, 1))
    for target in re.findall(r'href="#(\w+)"', page):
        assert f'id="{target}"' in page


def test_a_stranger_finds_the_six_answers_on_the_first_screen() -> None:
    """Where it peaks, how sure that is, why it falls, thrashing, gains, and what it depends on."""
    page = (REPORTS / "study.html").read_text()
    box = page[page.index('<div class="box">') : page.index("</div>")]
    for question in ("Where does throughput peak?", "How sure is that?", "Why does it fall at both",
                     "Is thrashing rare", "What do the optimisations gain?",
                     "What depends on an assumption?"):  # fmt: skip
        answer = box.partition(question)[2].partition("</li>")[0]
        assert re.search(r"\d", answer), question
    answers = re.sub(r"<[^>]*>|\s+", " ", box.partition("<ul>")[2])
    assert len(re.findall(r"[.?] ", answers)) <= 6 + 12, "six questions, twelve sentences"


@pytest.mark.parametrize("name", report.PARTS)
def test_a_part_needs_no_other_s_numbers(name, drawn, monkeypatch) -> None:
    """One that is made alone, as where one notebook ran, quotes nothing that is not there."""
    monkeypatch.setattr(report, "TABLES", dict.fromkeys(report.TABLES, lambda _: pd.DataFrame()))
    monkeypatch.setattr(report.Drawn, "image", lambda *_, **more: more["caller"]())
    wanted = ("setting", "split") if name == "split" else (name,)  # which one figure has
    numbers = report.made_of(drawn, {each: report.PARTS[each] for each in wanted})
    assert report.page(drawn, numbers)


def copy_figures(place: Path, *names: str, endings: str = "parquet json") -> None:
    """Of these figures the files with these endings."""
    for name, ending in product(names, endings.split()):
        shutil.copy(FOLDER / f"{name}.{ending}", place)


def copy_split(place: Path) -> None:
    copy_figures(place, "memory_split", "lost_time", endings="parquet json html")


def test_a_part_whose_figures_are_not_drawn_is_left_out(tmp_path) -> None:
    """As where few notebooks ran; the page lies beside its figures."""
    copy_split(tmp_path)
    page = report.write_report(tmp_path)
    assert page == tmp_path / "study.html"
    text = page.read_text()
    rows = pd.read_parquet(FOLDER / "memory_split.parquet").query("metric == 'same_work'")
    (same,) = rows[rows["rung"] == report.TINY].itertuples()
    assert ("do exactly the same" in text) is (same.low < same.high), "a peak of one share is one"
    assert "a study of its own, notebook 08" in text
    assert "<figure" not in text, "there are no images: no browser was there"
    assert '<p class="finding">On the measured tiny pair throughput is highest' in text
    shutil.copy(FOLDER / "memory_split.svg", tmp_path)
    assert "<figure" in report.write_report(tmp_path).read_text()
    record = json.loads((tmp_path / "memory_split.json").read_text())
    del record["images"]  # as where rows are drawn anew and no browser draws them
    said = record["parameters"]["provenance"]
    record["parameters"]["provenance"] = re.sub(r"\d+ runs of equal work.*", "few runs.", said)
    (tmp_path / "memory_split.json").write_text(json.dumps(record))
    text = report.write_report(tmp_path).read_text()
    assert "<figure" not in text, "the picture is of older rows"
    assert "differ by an amount that is not known in time" in text


def test_what_shares_lose_has_its_interval_where_the_rows_have_it_and_says_so_where_not() -> None:
    """Three shares, of which two do equal work; the third takes 4 s more, 3 of them again."""
    split = pd.DataFrame({"llm_share": [0.08, 0.3, 0.4], "metric": "tokens_per_s", "value": 1.0})
    split["ratio"] = split["ratio_low"] = split["ratio_high"] = [0.8, 1.0, 1.0]
    ends = pd.DataFrame({"metric": ["peak_share", "same_work"], "low": 0.3, "high": 0.4})
    spent = {"recomputed_evicted": (2.0, 0.0, 0.0), "recomputed_preempted": (1.0, 0.0, 0.0),
             "llm_decode": (7.0, 6.0, 6.0)}  # fmt: skip
    lost = pd.DataFrame([
        {"llm_share": share, "part": part, "seconds": seconds}
        for part, each in spent.items() for share, seconds in zip((0.08, 0.3, 0.4), each)
    ])  # fmt: skip

    def told(low: float, high: float) -> str:
        rows = split.assign(ratio_low=[low, 1.0, 1.0], ratio_high=[high, 1.0, 1.0])
        found = report.losses(pd.concat([rows, ends]), lost)
        assert (found["Equal"], found["Lost"]) == ("0.30 and 0.40", "20.0 % at 0.08")
        return found["Losses"]

    why = "computing again: 75 % of the extra time, slower decoding: 25 %)"
    assert told(0.78, 0.81) == f"20.0 % at 0.08 (95 %: 19.0 to 22.0 %; {why}"
    assert told(float("nan"), 0.81) == f"20.0 % at 0.08 (no interval kept; {why}"
    split["ratio"] = [1.05, 1.0, 1.0]
    assert report.losses(pd.concat([split, ends]), lost)["Lost"] == "nothing"


def test_gains_are_the_figures_own_and_name_the_technique_that_makes_them(tmp_path) -> None:
    """Counted again from the rows, at the smallest budget; one share there does not fit."""
    copy_figures(tmp_path, "optimisation", "optimisation_replayed", "memory_parts")
    rows = pd.read_parquet(FOLDER / "optimisation.parquet")
    rows = rows[rows["budget"] == rows["budget"].min()]
    bad = rows.iloc[[0]].assign(metric="infeasible", kv_share=0.9, value=float("nan"))
    pd.concat([rows, bad]).to_parquet(tmp_path / "optimisation.parquet")
    rate = rows[rows["metric"] == "tokens_per_s"].set_index(["policy", "technique", "kv_share"])
    speed, named = rate["value"].to_dict(), report.policy_numbers(report.Drawn(tmp_path))
    best = max((v, share) for (p, what, share), v in speed.items() if (p, what) == PLAIN)
    assert named["tinyOneName"] == "adaptive problem batching"
    told = {"tinyOne": ("static", "adaptive", 0.3), "tinyAll": EVERYTHING, "tinyFlow": FLOWING}
    for name, setting in told.items():
        own = rate.loc[[key for key in rate.index if key[: len(setting)] == setting]]
        ((value, low, high),) = own[["value", "low", "high"]].to_numpy() / best[0]
        assert named[name] == f"{value:.2f} ({low:.2f} to {high:.2f})"
    assert named["bestTried"].startswith(f"{best[1]:g}")
    plain = {share: v for (p, what, share), v in speed.items() if (p, what) == PLAIN}
    worst = min(plain, key=plain.__getitem__)
    assert named["worstTried"] == f"{plain[worst] / best[0]:.2f} at {worst:g}"
    assert named["tinyStatic"].startswith(f"{plain[0.3] / best[0]:.2f} (")
    others = named["tinyOthers"].replace(" and ", ", ").split(", ")
    assert len(others) == int(named["tinyCount"]) - 1
    assert named["bestTried"].endswith("; 0.9 leaves a model less than one request")


def test_what_more_memory_leaves_to_gain_is_told_for_every_further_budget(tmp_path) -> None:
    """Over the best static split of its own budget; nothing where one budget was tried."""
    copy_figures(tmp_path, "optimisation", far := "optimisation_replayed")
    rows = pd.read_parquet(FOLDER / "optimisation.parquet")
    rows = rows[rows["budget"] == rows["budget"].min()]
    ample = rows.assign(budget=2.0, value=3 * rows["value"], low=2 * rows["low"])
    rows.to_parquet(tmp_path / "optimisation.parquet")
    with pytest.raises(LookupError, match="no second budget"):
        report.gain_numbers(report.Drawn(tmp_path))
    pd.concat([rows, ample]).to_parquet(tmp_path / "optimisation.parquet")
    rate = rows[rows["metric"] == "tokens_per_s"].set_index(["policy", "technique", "kv_share"])
    best = rate.loc["static", "none"]["value"].max()
    value, low, high = (rate.loc[EVERYTHING].iloc[0][c] / best for c in ("value", "low", "high"))
    told = report.gain_numbers(report.Drawn(tmp_path))
    assert told["ampleAll"] == f"{value:.2f} ({2 / 3 * low:.2f} to {high / 3:.2f}) with 2 W"
    names = "ampleFlow", "ampleTogether", "ampleAll"
    assert {*told} == {*names, *(f"farA{name[1:]}" for name in names)}
    rows = pd.read_parquet(FOLDER / f"{far}.parquet").query("metric == 'tokens_per_s'")
    rate = rows[rows["budget"] == 1].set_index(["policy", "technique", "kv_share"])["value"]
    lost = rate.loc[FLOWING].iloc[0] / rate.loc["static", "none"].max()
    flow = told["farAmpleFlow"]
    assert flow.startswith(f"{lost:.2f} (") and " with 1 W and " in flow


def test_padding_is_told_at_a_limit_of_both_kinds_and_a_fourth_pair_has_a_column(tmp_path) -> None:
    """As where the grid of a smaller profile has other limits than padded batches were tried at."""
    copy_figures(tmp_path, *{file.stem for file in FOLDER.glob("*.parquet")})
    rows = pd.read_parquet(tmp_path / "balance.parquet")
    few = (rows["metric"] == "waste") & (rows["kind"] == "continuous")
    few &= ~rows["max_num_seqs"].isin([8, 64, 512])
    rows[~few].to_parquet(tmp_path / "balance.parquet")
    assert report.batch_numbers(report.Drawn(tmp_path))["paddedSeqs"] in ("8", "64")
    tex = report.booktabs("verdicts", pd.DataFrame([list("abcdef")], columns=list("ABCDEF")))
    assert tex.count("\\linewidth") == 6


def test_the_page_names_the_strategy_that_was_searched(drawn) -> None:
    told = drawn.parameters("memory_split") | {"strategy": "best_of_n"}
    other = SimpleNamespace(parameters=lambda _: told, rows=drawn.rows)
    assert report.setting_numbers(other)["searchBy"] == "best of n"


def test_a_verdict_names_the_pairs_it_is_of() -> None:
    """Guards a caption of three panels that gives the verdict of one."""
    first = judged.Claim("C5", "", judged.HOLDS, "1.0", "")
    smol = replace(first, rung=RECORDED, verdict=judged.DEPENDS, number="1; it depends on n: 0.1")
    far = replace(first, rung=REPLAYED, verdict=judged.FAILS)
    assert report.spoken_of_pairs([first, smol, far]) == (
        "on the measured tiny pair it holds; on SmolLM2, replayed, it depends on n; on 1B + 8B, "
        "replayed, it fails"
    )
    assert report.spoken_of_pairs([first, replace(far, verdict=first.verdict)]).endswith("it holds")


def test_the_figures_of_hits_and_thrashing_give_the_verdict_of_every_pair(drawn) -> None:
    page = " ".join((REPORTS / "study.html").read_text().split())
    for figure, key in (("prefix_hits", "C5"), ("thrashing", "C6")):
        words = report.spoken_of_pairs(claim for claim in drawn.claims if claim.key == key)
        assert words in page.partition(f"{figure}.</b>")[2].partition("<details>")[0]


def test_values_that_the_thesis_gives_are_not_counted_as_open(drawn) -> None:
    named = report.missing_numbers(drawn)
    rows = sensitivity.missing_values(*sensitivity.stored()).set_index("value")
    assert rows.loc["beam width", "thesis"] == "four"
    untried = (rows["conclusion"] == sensitivity.UNTRIED).sum()
    assert int(named["missingCount"]) == len(rows) - untried - int(named["givenCount"])
    assert untried and int(named["givenCount"]) == len(sensitivity.GIVEN) == 5
    depend = rows.index[rows["conclusion"] == sensitivity.DEPENDS].difference(sensitivity.GIVEN)
    most = re.split(", | and ", named["missingMost"])
    assert most and set(most) <= set(depend), "of several that change as much none is the most"
    others = set(re.split(", | and ", named["missingNames"])) - {"none"}
    assert {*most, *others} == set(depend)


def test_where_only_given_values_were_tried_none_is_called_an_assumption(tmp_path) -> None:
    """Of the depth alone, which changes the losses most and is the thesis's own."""
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    file = tmp_path / f"{sensitivity.FIGURE}.parquet"
    rows = pd.read_parquet(file)
    rows[rows["value"].isin([sensitivity.TAKEN, "depth of the search"])].to_parquet(file)
    drawn = report.Drawn(tmp_path)
    assert report.missing_numbers(drawn)["missingMost"] == "none"
    page = " ".join(report.page(drawn, report.made_of(drawn, report.PARTS)).split())
    assert "Of the values tried, none that the thesis leaves open." in page
    assert "depends most on" not in page


@pytest.mark.parametrize("where", ["left out", "below captions", "in a list"])
def test_a_small_article_of_all_numbers_tables_and_figures_compiles(tmp_path, drawn, where) -> None:
    """Nothing runs out of a plain one of 11 pt; braces and characters are checked without TeX."""
    tables = report.made_of(drawn, report.TABLES)
    macros = report.made_of(drawn, report.PARTS).values()
    for name in (*tables, "numbers"):
        text = (REPORTS / f"{name}.tex").read_text()
        bare = re.sub(r"\\[\\{}%&$#_]", "", text)
        assert bare.count("{") == bare.count("}"), name
        assert not re.search(r"[$#~^]", re.sub(r"^%.*$", "", bare, flags=re.M)), name
    engine = next(filter(shutil.which, ENGINES), None)
    if engine is None:
        pytest.skip(f"no TeX is here ({', '.join(ENGINES)}): the article was not compiled")
    told = (ROOT / "workbench" / "experiments" / "README.md").read_text()
    below, listed = re.findall(r"^ +(\\newcommand\{\\provenance\}.*)$", told, flags=re.M)
    for folder in (FOLDER, REPORTS):
        (tmp_path / folder.name).mkdir()
        for file in (*folder.glob("*.tex"), *folder.glob("*.pdf")):
            shutil.copy(file, tmp_path / folder.name)
    lines = [r"\documentclass[11pt]{article}", r"\usepackage{array,booktabs,graphicx,longtable}"]
    lines += [r"\graphicspath{{figures/}}", r"\input{reports/numbers}"]
    lines += [{"left out": "", "below captions": below, "in a list": listed}[where]]
    lines += [r"\begin{document}", r"{\raggedright"]
    lines += [f"\\{report.macro(name)}{{}}," for own in macros for name in own] + [r"\par}"]
    lines += [f"\n\\noindent\\input{{reports/{name}}}" for name in tables]
    lines += [f"\\input{{figures/{file.stem}}}\\clearpage" for file in sorted(FOLDER.glob("*.tex"))]
    (place,) = re.findall(r"`(\{\\makeatletter.*\})`", told)
    lines += [place] * (where == "in a list")
    (tmp_path / "article.tex").write_text("\n".join([*lines, r"\end{document}"]))
    how = ["--keep-logs"] if engine == "tectonic" else ["-interaction=nonstopmode"]
    for _ in range(1 if engine == "tectonic" else 3):  # until widths and lists are settled
        subprocess.run([engine, *how, "article.tex"], cwd=tmp_path, capture_output=True)
    log = (tmp_path / "article.log").read_text(errors="replace")
    assert re.findall(r"^(?:!|.*Undefined control sequence|.*Missing character).*", log, re.M) == []
    over = re.findall(r"Overfull \\[hv]box \(([\d.]+)pt too \w+\)[^\n]*\n[^\n]*", log)
    assert [points for points in over if float(points) > 1] == []
    assert (tmp_path / "article.pdf").stat().st_size > 100_000
    if where != "below captions":
        assert re.findall("Float too large.*", log) == []


def test_every_macro_that_a_readme_names_is_one() -> None:
    """Guards an example that does not compile."""
    defined = (REPORTS / "numbers.tex").read_text()
    pages = [ROOT / "README.md", *(ROOT / "workbench").rglob("README.md")]
    named = [name for page in pages for name in re.findall(r"\\(wb[A-Za-z]+)", page.read_text())]
    assert named and all(f"{{\\{name}}}" in defined for name in named), named


@pytest.mark.filterwarnings("ignore:invalid value")  # of replays whose shares lose nothing
@pytest.mark.parametrize(
    ("best", "equal", "said"),  # the interval of the best share, and the shares of equal work
    [
        (ONE, ONE, "throughput is highest at 0.30 (95 %: 0.30 to 0.30);"),
        (ALL, ONE, "no peak is shown between 0.08 and 0.50, for its interval is the whole axis"),
        (ALL, ALL, "no peak is shown: every share from 0.08 to 0.50 does the same work"),
    ],
)
def test_the_first_screen_tells_the_story_of_these_rows_alone(tmp_path, best, equal, said) -> None:
    """As of a profile too small to tell a peak, or of runs in which one share is the best."""
    copy_split(tmp_path)
    rows = pd.read_parquet(FOLDER / "memory_split.parquet")
    for metric, ends in (("peak_share", best), ("same_work", equal)):
        rows.loc[rows["metric"] == metric, ["value", "low", "high"]] = (0.3, *ends)
    rows.to_parquet(tmp_path / "memory_split.parquet")
    page = " ".join(report.write_report(tmp_path).read_text().split())
    box = page[page.index('<div class="box">') : page.index("</div>")]
    assert said in box and "At no single share" not in box
    assert ("there it holds" in box) is (best == ONE)
    assert ("Why does it fall at both ends?" in box) is (equal != ALL)
    assert ("Does it fall at the ends?" in box) is (equal == ALL)
    assert "differ by up to" in box and ("and shares by" in box) is (equal == ALL)
    assert "Equal work ends" not in page, "some shares are equal, and others not"


@pytest.mark.parametrize(
    ("lru", "optimum", "replay", "said"),
    [
        (0.80, 0.90, 0.70, "policy and size both matter"),
        (0.80, 0.95, 0.95, "only the policy matters"),
        (0.90, 0.90, 0.95, "only the size matters"),
        (0.95, 0.95, 0.70, "only the size matters"),
        (0.95, 0.95, 0.95, "neither policy nor size matters"),
    ],
)
def test_misses_beyond_an_optimum_are_policys_its_own_the_sizes(lru, optimum, replay, said) -> None:
    """Below the size that the order of calls needs, what a whole search misses is the size's."""
    hits = {"lru": (lru, 0.95), "optimum": (optimum, 0.95)}
    rows = [
        {"engine": "prm", "tokens": tokens, "kind": kind, "hit_ratio": hit}
        for kind, own in hits.items() for tokens, hit in zip((100, 900), own)
    ]  # fmt: skip
    rows.append({"engine": "prm", "tokens": 50, "kind": "replay", "hit_ratio": replay})
    rows.append({"engine": "prm", "tokens": 400, "kind": "lru", "hit_ratio": lru})  # no optimum
    assert judged.policy_or_size(pd.DataFrame(rows))[0] == said


def test_the_page_says_of_policy_and_size_what_notebook_06_finds_in_the_rows(drawn) -> None:
    blame, told = judged.policy_or_size(drawn.rows("miss_ratio"))
    page = " ".join((REPORTS / "study.html").read_text().split())
    assert f"{blame.capitalize()}: {told}" in page
    assert "matter" not in TEMPLATE, "the rows say it, not the template"


def split_folder(place: Path, shares=(0.2, 0.3, 0.5), end=0.8, peak=(0.3, 0.3), **told) -> Path:
    """Figures of a split: tokens/s at the shares, +- 0.02, `end` at the last; and its settings."""
    rows = pd.DataFrame({"llm_share": shares, "metric": "tokens_per_s", "value": 1.0})
    rows["ratio"] = [*(1.0 for _ in shares[1:]), end]
    rows = rows.assign(ratio_low=rows["ratio"] - 0.02, ratio_high=rows["ratio"] + 0.02)
    ends = {"llm_share": 0.3, "metric": ["peak_share", "same_work"], "value": 0.3,
            "low": [peak[0], 0.3], "high": [peak[1], 0.3]}  # fmt: skip
    rows = pd.concat([rows, pd.DataFrame(ends)]).assign(rung="measured tiny")
    machine = {"cpu": "A CPU", "cores": 2, "threads": 2, "gpu": None}
    record = {"parameters": {"llm": "tiny-solver", "provenance": f"in {place.name}"} | told,
              "git": {"commit": "1234567890"}, "machine": machine}  # fmt: skip
    place.mkdir()
    rows.to_parquet(place / "memory_split.parquet")
    (place / "memory_split.json").write_text(json.dumps(record))
    return place


def test_intervals_that_overlap_are_inside_and_what_does_not_is_told_with_both(tmp_path) -> None:
    """0.80 +- 0.02 beside 0.83 and 0.77, and beside 0.85 and 0.75."""
    here = split_folder(tmp_path / "here")
    for end in (0.83, 0.77):
        near = judged.against(here, split_folder(tmp_path / f"{end}", end=end))
        assert "tokens/s over those at 0.3 (memory_split): 3 of 3 agree." in near
        assert "verdicts of the claims: 1 of 1 agree." in near
        assert near[-1] == "Settings that differ, here (committed): none."
        assert not any("differs:" in line or "only" in line for line in near)
    above = "0.8 [0.78, 0.82] here, 0.85 [0.83, 0.87] committed"
    for end, told in ((0.85, above), (0.75, "0.8 [0.78, 0.82] here, 0.75 [0.73, 0.77] committed")):
        far = judged.against(here, split_folder(tmp_path / f"{end}", end=end))
        assert "tokens/s over those at 0.3 (memory_split): 2 of 3 agree." in far
        assert f"  differs: measured tiny pair, share 0.5: {told}" in far


def test_rates_of_policies_are_compared_as_times_the_best_static_split() -> None:
    found = judged._intervals(FOLDER / "optimisation.parquet", "tokens_per_s", ("setting",))
    (best,) = (own[:2] for (*_, name), own in found.items() if name == "0.5W/static_0.5/none")
    assert best == (1, 1)


def test_what_one_side_alone_has_is_told_and_not_skipped(tmp_path) -> None:
    here = split_folder(tmp_path / "here", shares=(0.2, 0.3, 0.4, 0.5))
    there = split_folder(tmp_path / "there", shares=(0.1, 0.2, 0.3, 0.5))
    pd.DataFrame({"value": [1.0]}).to_parquet(there / "balance.parquet")
    lines = judged.against(here, there)
    told = "1 only here (share 0.4); 1 only committed (share 0.1)"
    assert f"tokens/s over those at 0.3 (memory_split): 3 of 3 agree; {told}." in lines
    assert "Figures only committed: balance." in lines
    (tmp_path / "none").mkdir()
    (line,) = judged.against(here, tmp_path / "none")
    assert "nothing is compared" in line


def test_a_verdict_that_differs_is_told_with_both_numbers(tmp_path) -> None:
    """At 0.3 alone it holds; where shares beyond its neighbours may be best it depends on them."""
    here = split_folder(tmp_path / "here", peak=(0.2, 0.5))
    lines = judged.against(here, split_folder(tmp_path / "there"))
    assert "share of the highest tokens/s (memory_split): 1 of 1 agree." in lines
    (line,) = (line for line in lines if line.startswith("  differs: C1, measured tiny pair: "))
    assert re.search(r": depends on \(.*\[0.20, 0.50\].*\) here, holds \(.*\) committed$", line)
    assert "verdicts of the claims: 0 of 1 agree." in lines


def test_settings_that_differ_are_a_line_a_figure_and_no_longer_than_can_be_read(tmp_path) -> None:
    here = split_folder(tmp_path / "here", n=16, seeds=[0, 1], plan={"num_problems": 5})
    there = split_folder(tmp_path / "there", n=16, seeds=[0], num_problems="one\n" * 100)
    record = json.loads((there / "memory_split.json").read_text())
    record |= {"git": {"commit": "abcdefabcdef"}, "machine": record["machine"] | {"cores": 4}}
    (there / "memory_split.json").write_text(json.dumps(record))
    head, line = judged.against(here, there)[-2:]
    assert head == "Settings that differ, here (committed):"
    told = f"seeds [0, 1] ([0]); num_problems 5 ({'one ' * 13}[...]); commit 1234567 (abcdefa); "
    told += "machine A CPU, 2 cores, 2 threads (A CPU, 4 cores, 2 threads)"
    assert line == f"  memory_split: {told}."


def test_the_committed_figures_are_not_compared_with_themselves(tmp_path) -> None:
    here = split_folder(tmp_path / "here")
    assert judged.against(here, here) == []
    assert judged.against(here, tmp_path / "here" / ".." / "here") == []
    copied = shutil.copytree(FOLDER, tmp_path / "copy", ignore=shutil.ignore_patterns("*.*l", "*g"))
    lines = judged.against(copied, FOLDER)
    counts = [re.search(r": (\d+) of (\d+) agree\.$", line) for line in lines]
    # all but the replays of optimisation_replayed; and verdicts
    assert [m[1] == m[2] != "0" for m in counts if m] == [True] * len(judged.COMPARED)
    assert len(lines) == len(judged.COMPARED) + 2  # the rule, settings
    split = pd.read_parquet(FOLDER / "memory_split.parquet").query("metric == 'tokens_per_s'")
    measured = ~split["rung"].str.startswith("replayed")
    assert f": {measured.sum()} of" in lines[1], "equal replays are no evidence"


@pytest.mark.parametrize("drawn", [("lost_time",), ("lost_time", "sensitivity")])
def test_a_project_with_few_figures_has_a_report_of_these(drawn, tmp_path, monkeypatch) -> None:
    """Parts of the page without figures are left out, and claims.md without the blocks'."""
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    for name in ("memory_split", *drawn):
        for file in FOLDER.glob(f"{name}.*"):
            (tmp_path / "figures").mkdir(exist_ok=True)
            shutil.copy(file, tmp_path / "figures")
    made = report.write_report(tmp_path / "figures")
    assert made.is_relative_to(tmp_path) and "fastest" in made.read_text()
    assert not list(tmp_path.glob("**/claims.md"))
