"""The paper's evaluation, run again cell by cell with the paper's figures beside."""
