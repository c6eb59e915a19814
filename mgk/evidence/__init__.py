"""The paper's claims held against what was measured: tables, intervals, verdicts and pictures, made from results/."""
