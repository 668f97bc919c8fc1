"""Requests while they run: streams, tickets, the scheduler, sequences and their passes."""
