"""A root that nobody has saved to yet: its index is new, but there is nothing to rebuild, so nobody need be called."""

import shutil
from pathlib import Path

from tests.server.serving import fill, serving


def test_a_root_is_to_be_rebuilt_when_segments_lie_in_it_that_the_index_does_not_know(tmp_path: Path) -> None:
    with serving(fill(tmp_path)) as served:
        served.index._loss = (b"lost",)
        for segments, state in ((True, "to be rebuilt"), (False, "ok")):
            if not segments:
                for path in tmp_path.glob("v2/*/*.kvseg"):
                    path.unlink()
            served.service.changed()
            assert served.call("GET", "/readyz").json() == {"is_ready": True, "index": state}
            assert f"kvtier_index_rebuilding {float(segments)}" in served.call("GET", "/metrics").text
        shutil.rmtree(tmp_path / "v2")
        assert served.call("GET", "/readyz").json()["index"] == "to be rebuilt", "nobody knows what lies there"
