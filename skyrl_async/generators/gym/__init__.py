"""Episodes in ``skyrl_gym`` environments over ``generate()``, in process."""
