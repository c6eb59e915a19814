"""What the heads of a model do: ranks, redundancy, mixtures, maps, cost; figures and one report of it all."""

from mgk.analysis.analyse import Analysis, Layer, analyse
from mgk.analysis.ranks import Spectra, spectra
from mgk.analysis.similarity import effective_number

__all__ = ["Analysis", "Layer", "Spectra", "analyse", "effective_number", "spectra"]
