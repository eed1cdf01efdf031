"""Experiments: data, models, training and reports. The library itself never imports from here."""
