"""What holds for all tests: properties are about results, not about how busy the machine is."""

from hypothesis import HealthCheck, settings

settings.register_profile("guava", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("guava")
