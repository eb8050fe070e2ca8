"""The search tree: laid out without crossings, read node by node, clicked without a mouse."""

import pandas as pd
import pytest

from tests.widgets.conftest import HOSTILE
from workbench.errors import ConfigError
from workbench.widgets.tree import TreeView, in_words, node_text, problem_tree, tree_figure

STEPS = [  # node, text, score, kept, finished
    ("0", "1+1=2\n\n", 0.9, True, False),
    ("1", f"{HOSTILE}\n\n", 0.1, False, False),
    ("0/1", "2+2=4\n\n", 0.8, True, False),
    ("0/0", "2+2=5\n\n", 0.2, False, False),
    ("0/1/0", "The answer is \\boxed{4}.", 0.6, True, True),
    ("0/1/1", "The answer is \\boxed{4}.", 0.7, True, True),
    ("0/1/2", "The answer is \\boxed{7}.", 0.95, True, True),
]


def node(name, text, score, kept, finished, problem="p"):
    parent, _, _ = name.rpartition("/")
    path = {"problem_id": problem, "node_id": name, "parent_id": parent}
    reason = "eos" if finished else "stop"
    sizes = {"depth": name.count("/") + 1, "step_tokens": 5, "total_tokens": 5 * len(name)}
    state = {"score": score, "kept": kept, "finished": finished, "finish_reason": reason}
    return path | sizes | state | {"text": text}


@pytest.fixture
def tables():
    rows = [node(*step) for step in STEPS]
    other = node("0", "no box", 0.5, True, True, "q")
    problems = [
        {"problem_id": "p", "problem": "Compute 1+1+2.", "predicted": "4", "correct": True},
        {"problem_id": "q", "problem": "Compute 1.", "predicted": "", "correct": False},
    ]
    return pd.DataFrame(problems).assign(prm_tokens_asked=9), pd.DataFrame([*rows, other])


def test_children_stand_in_their_parents_order_so_no_edges_cross(tables):
    nodes = problem_tree(*tables).nodes
    assert list(nodes["node_id"]) == ["0", "1", "0/0", "0/1", "0/1/0", "0/1/1", "0/1/2"]
    assert list(nodes["place"]) == [0, 1, 0, 1, 0, 1, 2]


def test_the_chosen_solution_is_the_best_that_gives_the_winning_answer(tables):
    """0/1/2 scores higher and lost the vote."""
    found = problem_tree(*tables)
    assert found.chosen == "0/1/1"
    assert set(found.nodes.loc[found.nodes["chosen"], "node_id"]) == {"0", "0/1", "0/1/1"}
    assert "The answer that won is 4 (right); node 0/1/1" in in_words(found)
    other = problem_tree(*tables, "q")
    assert other.chosen is None
    assert "No solution has an answer" in in_words(other)


def test_a_nodes_text_is_its_path_and_its_own_step(tables):
    text = node_text(problem_tree(*tables), "0/1")
    assert text.startswith("node 0/1, depth 2: chosen, score 0.800, 5 tokens in this step")
    assert text.split("\n")[2:] == ["Compute 1+1+2.", "1+1=2", "--------", "2+2=4"]


def test_an_unknown_problem_or_node_is_named(tables):
    with pytest.raises(ConfigError, match=r"no problem 'r'.*Known: p, q"):
        problem_tree(*tables, "r")
    with pytest.raises(ConfigError, match="no node '0/9'"):
        node_text(problem_tree(*tables), "0/9")


def test_the_figure_tells_roles_apart_and_names_its_colours(tables):
    """Markers by role with their nodes, scores as colours with a bar, the chosen line thick."""
    fig = tree_figure(problem_tree(*tables), "0/0", "what was measured")
    roles = {t.meta: t for t in fig.data if t.meta}
    assert list(roles["pruned"].customdata) == ["1", "0/0"]
    assert roles["pruned"].opacity < roles["kept"].opacity == 1
    assert list(roles["finished"].marker.color) == [0.6, 0.7, 0.95]
    assert fig.layout.coloraxis.colorbar.title.text == "PRM score"
    at = list(roles["pruned"].customdata).index("0/0")
    assert (roles["ring"].x[0], roles["ring"].y[0]) == (2, roles["pruned"].y[at])


def test_no_score_is_told_where_the_prm_was_not_asked(tables):
    """Self-consistency only votes: grey markers, no bar of scores, none in the texts."""
    problems, nodes = tables
    tree = problem_tree(problems.assign(prm_tokens_asked=0), nodes.assign(score=0.5))
    assert tree.chosen == "0/1/0"
    assert node_text(tree, "0/1").startswith("node 0/1, depth 2: chosen, 5 tokens in this step")
    fig = tree_figure(tree)
    assert not fig.layout.coloraxis.to_plotly_json()
    assert "score" not in "".join(trace.hovertemplate or "" for trace in fig.data)
    known = problem_tree(problems.assign(prm_tokens_asked=0), nodes)  # of a score cache
    assert "score 0.800" in node_text(known, "0/1")


def test_menus_show_a_node_and_its_text(tables):
    """Ring, text and command are the chosen node's; a pinned text stays beside another problem."""
    view = TreeView(*tables, n=3)
    assert "node 0/1/1" in view.text.value
    other = TreeView(*tables, "", "q", "0")
    assert (other.problem.value, other.node.value) == ("q", "0")
    view.node.value = "1"
    assert "&lt;img" in view.text.value and "<img" not in view.text.value
    view.node.value = "0/0"
    assert "2+2=5" in view.text.value
    assert 'node: "0/0"' in view.copy.value
    assert "pinned node 0/0" in view.pin()
    view.problem.value = "q"
    assert "no box" in view.text.value
    assert "2+2=5" in view.pinned.value
    assert 'problem: "q"' in view.copy.value
