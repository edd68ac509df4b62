"""Raising a lab, staying with it, answering for it, ending it."""
