"""What a cluster will do before it is rented: a run's files in, the real loop in virtual time, a forecast out."""
