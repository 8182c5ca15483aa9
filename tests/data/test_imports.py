from __future__ import annotations

import subprocess
import sys


def test_opening_json_lines_and_generated_rows_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from strop.config.data import DataSource\n"
        "import strop.environments\n"
        "from strop.data import open_source\n"
        "open_source(DataSource(path='strop.data.arithmetic:problems', arguments={'count': 3}))\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "rooms = {name.split('.')[1] for name in sys.modules if name.startswith('strop.')}\n"
        "assert rooms <= {'config', 'data', 'environments', 'rewards', 'errors', 'paths'}, rooms\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
