"""An invoice-payment crew and a provider that loses acknowledgements: what the effect ledger is for."""
