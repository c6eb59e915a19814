"""What the heads of a model do: ranks, redundancy, mixtures, maps, cost; figures and one report of it all."""

from mgk.analysis.ranking import Spectra, spectra
from mgk.analysis.redundancy import effective_number
from mgk.analysis.survey import Analysis, Layer, analyse

__all__ = ["Analysis", "Layer", "Spectra", "analyse", "effective_number", "spectra"]
