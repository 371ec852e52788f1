package config

import (
	"errors"
	"time"
)

// Planner is everything a planner node can be told.
type Planner struct {
	Listen      string   `yaml:"listen" doc:"address of gRPC, for gateways and the leaders of engine groups"`
	HTTP        string   `yaml:"http" doc:"address of /metrics, /healthz, /readyz and /debug/pprof; empty turns it off"`
	DrainWithin Duration `yaml:"drain_timeout" doc:"how long SIGTERM waits for calls to end"`

	Schedule Schedule `yaml:"schedule"`
	Auth     Auth     `yaml:"auth"`
	Log      Log      `yaml:"log"`
	Trace    Trace    `yaml:"trace"`
	Insecure bool     `yaml:"insecure" doc:"allow listening beyond loopback without a token or TLS: anyone who reaches the port can submit, take and end requests"`
}

// Schedule are the constants of dualpath.Options; 0 leaves the default, which
// follows from the two rates. Rates are in tokens a second, lengths in tokens.
type Schedule struct {
	ReadPolicy   string   `yaml:"read_policy" doc:"which side reads a cached prefix: split (both, by when each would be done), shorter (reading queue), round-robin or prefill-only"`
	ReadRate     float64  `yaml:"read_rate" doc:"what one storage NIC reads, tokens a second, until its node reports what it measured"`
	PrefillRate  float64  `yaml:"prefill_rate" doc:"what one prefill engine computes, tokens a second"`
	Alpha        int      `yaml:"alpha" doc:"short reading queue threshold, tokens; 0: 3 s of read_rate"`
	Beta         int      `yaml:"beta" doc:"most unfinished tokens of a prefill engine; 0: 5 s of prefill_rate"`
	ZFactor      float64  `yaml:"z_factor" doc:"high-token threshold of decode engines over the mean"`
	BlockTokens  int      `yaml:"block_tokens" doc:"tokens of a block; parts are cut at its multiples"`
	MinPart      int      `yaml:"min_part" doc:"smallest part worth a second side, tokens"`
	SlowFactor   float64  `yaml:"slow_factor" doc:"a side is left when staying takes this many times as long as moving"`
	HedgeFactor  float64  `yaml:"hedge_factor" doc:"a part that took this many times as long as predicted is read by both sides"`
	MaxHedge     int      `yaml:"max_hedge" doc:"longest part that both sides read, tokens"`
	Patience     Duration `yaml:"patience" doc:"neither is done before a part has taken this long"`
	GroupTimeout Duration `yaml:"group_timeout" doc:"a group that does not fetch for so long is gone, and what it had is planned anew"`
	MaxQueue     int      `yaml:"max_queue" doc:"requests that wait or are served; more are rejected"`
	Explain      int      `yaml:"explain" doc:"how many requests are remembered for plan explain"`
}

// DefaultPlanner returns the configuration of a planner that was told nothing.
// The zeros of Schedule are dualpath's defaults.
func DefaultPlanner() Planner {
	return Planner{
		Listen:      "127.0.0.1:7430",
		HTTP:        "127.0.0.1:7432",
		DrainWithin: Duration(5 * time.Second),
		Schedule:    Schedule{ReadPolicy: "split"},
		Log:         Log{Level: "info", Format: "text"},
	}
}

// Keys returns every key of p, in the order of the struct. Setting a key sets
// the field of p.
func (p *Planner) Keys() []Key { return keysOf(p) }

// Validate reports everything that is wrong with p but its Schedule, which the
// planner checks, joined into one error, or nil.
func (p *Planner) Validate() error {
	var errs []error
	bad := complaintsTo(&errs)
	checkAddresses(bad, map[string]string{"listen": p.Listen, "http": p.HTTP})
	if p.DrainWithin < 0 {
		bad("drain_timeout", "must not be negative, is %v", p.DrainWithin)
	}
	p.Auth.check(bad)
	p.Log.check(bad)
	if !p.Insecure {
		p.Auth.checkExposure(bad, map[string]string{"listen": p.Listen})
	}
	return errors.Join(errs...)
}
