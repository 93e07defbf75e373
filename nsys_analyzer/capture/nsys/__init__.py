"""Runs a program under nsys, with what the installation lacks made up for."""
