"""Three hospitals learn scikit-learn's digits together; the server can forget one."""
