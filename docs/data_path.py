"""Draws docs/data_path.svg, the picture of README.md.

PYTHONPATH=. python docs/data_path.py
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.plots import page, save


def data_path(path: Path) -> None:
    """Draw how a save goes down to the files and a load comes up from them: the picture of README.md."""
    from matplotlib.patches import FancyBboxPatch

    figure, axes = page("", (8.0, 4.3))
    axes.set(xlim=(0, 100), ylim=(0, 54))
    axes.axis("off")

    def box(x: float, y: float, width: float, height: float, text: str, colour: str) -> None:
        axes.add_patch(FancyBboxPatch((x, y), width, height, "round,pad=0.6", facecolor=colour, edgecolor="#456"))
        axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8.5)

    def arrow(start: tuple[float, float], end: tuple[float, float], text: str, align: str, style: str = "-") -> None:
        axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#234", "lw": 1.4, "linestyle": style})
        side = 1.0 if align == "left" else -1.0
        axes.text((start[0] + end[0]) / 2 + side, (start[1] + end[1]) / 2, text, ha=align, va="center", fontsize=8)

    for x, title in (
        (3, "vLLM worker that computed a prompt"),
        (59, "any other worker, at any TP size, any time later"),
    ):
        axes.text(x + 19, 52, title, ha="center", fontsize=9, fontweight="bold")
        box(x, 41, 38, 7, "GPU memory: paged KV cache of the engine", "#dbe9f6")
    box(3, 23, 38, 7, "pinned host memory: cache of encoded chunks", "#e6f2dd")
    unit = "a chunk of 256 tokens is one slab with a checksum for each KV head"
    box(3, 3, 63, 9, f"POSIX path (NVMe, NFS, Lustre, ...): segment files\n{unit}", "#f6ecd7")
    box(76, 3, 21, 9, "index: LMDB or Redis\nprefix hash -> place", "#f1dfee")
    arrow((14, 40.2), (14, 31), "gather, encode, sum", "left")
    arrow((14, 22.2), (14, 13), "direct writes, header last", "left")
    arrow((63, 13), (63, 40.2), "direct reads into the GPU;\neach slab is verified\nthere, then scattered", "left")
    arrow((92, 40.2), (92, 13), "one lookup\na prompt", "left", "--")
    arrow((67.2, 7.5), (75, 7.5), "", "left", "--")
    axes.text(71, 9, "publish", ha="center", fontsize=8)
    save(figure, path)


if __name__ == "__main__":
    data_path(Path(__file__).with_suffix(".svg"))
