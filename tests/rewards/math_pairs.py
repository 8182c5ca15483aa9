"""Pairs of a reference answer and an answer, equal and different ones, by kind."""

from __future__ import annotations


def pairs(text: str) -> dict[str, list[tuple[str, str]]]:
    """Lines `reference ~ answer` below headings `# kind`."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in text.strip().splitlines():
        if line.startswith("# "):
            found[line[2:]] = []
        else:
            gold, _, answer = line.partition(" ~ ")
            found[list(found)[-1]].append((gold, answer))
    return found


EQUAL = pairs(r"""
# numbers
5 ~ 5.0
5 ~ +5
-1 ~ -1
-1 ~ −1
7 ~ 7
0.25 ~ 1/4
1234 ~ 1,234
1234 ~ 1{,}234
1234567 ~ 1\,234\,567
10000 ~ 10,\!000
1,000 ~ 10^3
007 ~ 7
1e3 ~ 1\times10^{3}
0.002 ~ 2 \cdot 10^{-3}
2024 ~ \boxed{2024}
5 ~ ((5))
32 ~ 4 \times 8
# fractions and decimals
1/2 ~ \frac{1}{2}
1/2 ~ \frac12
0.5 ~ \dfrac{1}{2}
1/2 ~ 0.5
1/3 ~ 0.3333333
7/2 ~ 3\frac{1}{2}
3.5 ~ 3\frac12
-\frac{1}{2} ~ \frac{-1}{2}
-0.5 ~ -\frac12
2/4 ~ 1/2
1/2 ~ ½
1/1024 ~ (1/2)^{10}
0.1 ~ \frac{1}{10}
# percentages
50 ~ 50\%
0.5 ~ 50\%
50\% ~ 0.5
50\% ~ 50
50\% ~ \frac{1}{2}
12.5% ~ 12.5 percent
# units
5 ~ 5\text{ cm}
5 cm ~ 5
5 ~ 5 apples
36 ~ 36\text{ cm}^2
36 ~ 36\text{ square units}
5 ~ \$5
45 ~ 45^\circ
45 ~ 45°
90 ~ 90\,\mathrm{km/h}
1.5 ~ 1.5 hours
5 cm ~ 5 m
# roots and constants
2\sqrt{3} ~ \sqrt{12}
sqrt(2) ~ \sqrt{2}
\sqrt2 ~ √2
\sqrt{12} ~ 2√3
3.14159265 ~ \pi
\frac{\pi}{4} ~ \pi/4
20\pi ~ 62.8318530718
11 ~ \sqrt{121}
10 ~ \binom{5}{2}
120 ~ 5!
3 ~ \log_2 8
2^{2024} ~ 2^{2024}
\infty ~ ∞
\frac{\sqrt{2}}{2} ~ \frac{1}{\sqrt{2}}
# intervals
(1,2] ~ \left(1, 2\right]
[0.5,3) ~ [\frac12,3)
(-\infty,3)\cup[5,\infty) ~ [5,\infty)\cup(-\infty,3)
(1,2) ~ 1<x<2
1<x<2 ~ (1,2)
[1,2] ~ 1\le x\le 2
x\in[1,2] ~ [1,2]
(1,2] ~ x \in (1, 2]
(1,2] ~ 1 < x \le 2
# sets and tuples
{1,2} ~ \{2,1\}
\{1,2,3\} ~ 3,1,2
1,2 ~ 2, 1
(1,2,3) ~ \left(1,2,3\right)
(\frac12,3) ~ (0.5,3)
\pm 2 ~ \{-2,2\}
10\text{ or }12 ~ 12,10
5 ~ \{5\}
\emptyset ~ ∅
(1,(2,3)) ~ (1, (2, 3))
# algebra
x=5 ~ 5
5 ~ x = 5
y=2x+3 ~ y=3+2x
2x+3 ~ y=2x+3
x^2+2x+1 ~ (x+1)^2
x=1,y=2 ~ y=2,x=1
\frac{a}{b} ~ a/b
2+3i ~ 3i+2
a+b ~ b+a
x^2-1 ~ (x-1)(x+1)
5 ~ 2+3=5
\begin{pmatrix}1&2\\3&4\end{pmatrix} ~ \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
# words
Paris ~ \text{Paris}
Paris ~ paris
yes ~ Yes
B ~ \text{(B)}
B ~ (B)
all real numbers ~ \text{all real  numbers}
""")

DIFFERENT = pairs(r"""
# numbers
5 ~ 6
5 ~ -5
5 ~ 50
1234567 ~ 1234568
2^{10} ~ 1025
10^{100} ~ 10^{100}+1
101 ~ 110
# fractions and decimals
1/2 ~ 0.51
1/3 ~ 0.33
\frac{1}{2} ~ \frac{2}{1}
3.5 ~ 2\frac12
1/2 ~ \frac{1}{2}x
# percentages
50 ~ 0.5
0.5 ~ 50
50\% ~ 5
50\% ~ 0.5\%
# units
5 ~ 6\text{ cm}
36 ~ 36^2
7 ~ 7x
# roots and constants
2\sqrt{3} ~ \sqrt{13}
\pi ~ 3.14
\sqrt{2} ~ 1.41
\frac{\pi}{4} ~ \frac{\pi}{3}
3 ~ 3i
# intervals
(1,2] ~ (1,2)
[1,2] ~ (1,2]
(1,2] ~ (1,3]
(1,2) ~ 1\le x\le 2
1<x<2 ~ 1<x<3
(-\infty,3)\cup[5,\infty) ~ (-\infty,3)\cup(5,\infty)
(-\infty,3)\cup[5,\infty) ~ (-\infty,3)
# sets and tuples
(1,2) ~ (2,1)
{1,2} ~ \{1,2,3\}
{1,2} ~ (1,2)
\pm 2 ~ (-2,2)
(-2,2) ~ \pm 2
1,2 ~ 1
(1,2,3) ~ (1,2)
1,1,2 ~ 1,2,2
\{5\} ~ 6
# guesses
4 ~ 4 \text{ or } 5
4 ~ 1,2,3,4
4 ~ \{4, 5\}
4 ~ 4=5
4 ~ 3 \le x \le 5
# algebra
x=5 ~ y=5
x^2 ~ x^3
x ~ y
x^2+1 ~ (x+1)^2
y=2x+3 ~ y=3x+2
\frac{a}{b} ~ b/a
# words
Paris ~ Pairs
Paris ~ London
yes ~ no
B ~ C
Paris ~ 5
stressed ~ desserts
""")
