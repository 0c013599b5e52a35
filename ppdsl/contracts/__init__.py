"""Contracts of a spec (`expect`), measured on a plan."""

from ppdsl.contracts.check import ContractReport, Measured, check_contracts, parameter_counts

__all__ = ["ContractReport", "Measured", "check_contracts", "parameter_counts"]
