"""docs/extending.md, word by word: its experiment and its module run."""

import json
import re
import subprocess
import sys
from pathlib import Path

DOCUMENT = (Path(__file__).parents[2] / "docs/extending.md").read_text()


def test_the_documents_own_experiment_runs_with_its_own_rule_attack_model_and_data(tmp_path):
    blocks = re.findall(r"```(toml|python)\n(.*?)```", DOCUMENT, flags=re.DOTALL)
    (tmp_path / "mine.toml").write_text("".join(text for kind, text in blocks if kind == "toml"))
    (tmp_path / "mine.py").write_text("".join(text for kind, text in blocks if kind == "python"))
    command = [sys.executable, "-m", "deploy.cli", "run", str(tmp_path / "mine.toml"), "--json", "--no-report"]
    done = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["status"], summary["rule"], summary["attack"]) == ("completed", "mine:middle", "mine:shout")
    assert summary["misbehaviour"] == ["mine:Stutter"]
    assert summary["final_accuracy"] > 0.6
