"""From GPU holders to engines: processes, endpoints, models and flags."""
