"""Analysis of attention heads: ranks, similarity, mixture components, maps, ablation, cost; figures and a report.

Shapes: H heads, M components per key, L queries, S keys, D head width, E value width, R rows of a block.
"""

from mgk.analysis.analyse import Analysis, analyse
from mgk.analysis.layer import Layer
from mgk.analysis.ranks import Spectra, spectra
from mgk.analysis.similarity import effective_number

__all__ = ["Analysis", "Layer", "Spectra", "analyse", "effective_number", "spectra"]
