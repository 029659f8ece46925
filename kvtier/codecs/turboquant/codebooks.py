"""Lloyd-Max quantizers of N(0, 1), by bits of a code: constants, and what they are used for.

A code is `sign << (bits - 1) | magnitude`; sign 1 is negative, and the magnitude counts the positive thresholds below
the absolute value. Thresholds are those of the exact quantizer (Lloyd 1982, Max 1960), as the nearest fp32. Centroids
are whole numbers times `unit`, so that sums of them are exact in any order: at most 127 up to 4 bits (they fit int8),
else at most 2047 (fp16 holds them). `unit` is what gives these whole numbers the least error.

    bits   error of the exact quantizer   with whole centroids (of a variance of 1)
       2   0.117482                       0.117482
       3   0.034548                       0.034549
       4   0.009501                       0.009511
       5   0.0025047                      0.0025047
       6   0.00064424                     0.00064440

`tests/codecs/test_codebooks.py` solves for all of it again.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Codebook:
    """thresholds: positive, ascending, 2^(bits-1) - 1 of them. centroids: positive, ascending, one more than those."""

    bits: int
    unit: float
    thresholds: tuple[float, ...]
    centroids: tuple[int, ...]


CODEBOOKS = {
    book.bits: book
    for book in (
        Codebook(
            2, 0.0137294298,
            (
                0.981598794,
            ),
            (
                33, 110,
            ),
        ),
        Codebook(
            3, 0.0244347844,
            (
                0.500549734, 1.04995728, 1.74792755,
            ),
            (
                10, 31, 55, 88,
            ),
        ),
        Codebook(
            4, 0.0261686072,
            (
                0.258221656, 0.522403717, 0.799549758, 1.09928584, 1.4371388, 1.84353185, 2.40080333,
            ),
            (
                5, 15, 25, 36, 48, 62, 79, 104,
            ),
        ),
        Codebook(
            5, 0.00173366431,
            (
                0.131970748, 0.264715075, 0.399038911, 0.53581655, 0.676034689, 0.820850432,
                0.971674204, 1.13029385, 1.29907238, 1.48128426, 1.68173063, 1.9079808, 2.17323399,
                2.50442958, 2.97592592,
            ),
            (
                38, 114, 191, 269, 349, 431, 516, 605, 699, 800, 909, 1031, 1170, 1337, 1552, 1881,
            ),
        ),
        Codebook(
            6, 0.0019689512,
            (
                0.0668438971, 0.133787602, 0.200931951, 0.268379927, 0.336237758, 0.404616147,
                0.47363174, 0.543408394, 0.614079297, 0.685788751, 0.758694828, 0.832972109,
                0.908815742, 0.986445665, 1.06611228, 1.14810419, 1.23275733, 1.32046771, 1.41170871,
                1.50705385, 1.60721004, 1.71306539, 1.82575953, 1.94679415, 2.07821059, 2.22289562,
                2.38514304, 2.57178926, 2.79484034, 3.07892203, 3.49226928,
            ),
            (
                17, 51, 85, 119, 153, 188, 223, 258, 294, 330, 367, 404, 442, 481, 521, 562, 604, 648,
                693, 741, 790, 842, 898, 957, 1021, 1090, 1168, 1255, 1357, 1482, 1646, 1902,
            ),
        ),
    )
}  # fmt: skip
