package workload

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
)

// Each quantity has its own stream of random numbers, so that a change in the draws of one quantity
// does not change the others.
const (
	streamTurns = iota + 1
	streamTotals
	streamShares
	streamRounds
	streamAgents
)

// Spec describes a set of trajectories by its means, as Table 2 of the DualPath
// paper does.
type Spec struct {
	Name string
	// MaxLen is the longest context, in tokens. Turns, Append, Gen, Total and Context are the means
	// that type Means defines.
	MaxLen                             int
	Turns, Append, Gen, Total, Context float64
	// Decay is the exponent with which the append length of a round falls with the number of the
	// round. The paper does not print Decay; the value was fitted to Context.
	Decay float64
}

// Table2 returns the three sets of the DualPath paper: 32K, 48K and 64K.
func Table2() []Spec {
	return []Spec{
		{"32K", 32 << 10, 60, 608, 148, 28639, 17183, 0.365},
		{"48K", 48 << 10, 106, 474, 172, 42607, 25120, 0.412},
		{"64K", 64 << 10, 157, 429, 176, 55958, 32721, 0.347},
	}
}

// Table2Set returns the set with that name.
func Table2Set(name string) (Spec, error) {
	for _, s := range Table2() {
		if s.Name == name {
			return s, nil
		}
	}
	return Spec{}, fmt.Errorf("workload: no set %q; there are 32K, 48K and 64K", name)
}

// TurnsSigma returns the spread of the log-normal number of turns. With the total independent of
// the turns, E[total/turns] = Append + Gen and E[1/turns] = exp(sigma^2)/Turns.
func (s Spec) TurnsSigma() float64 {
	return math.Sqrt(math.Log(s.Turns * (s.Append + s.Gen) / s.Total))
}

// The shapes of the distributions, which Table 2 does not give. They were fitted to the table's
// Context and to the paper's statements about its trajectories.
const (
	minTurns = 3
	// A trajectory's length is either between nearFrom and 1 times MaxLen, or between anyFrom and 1
	// times MaxLen.
	nearFrom, anyFrom = 0.93, 0.30
	// The share of generated tokens is the mean share of the set times a log-normal factor with
	// mean 1.
	shareMu, shareSigma, shareMin, shareMax = -0.045, 0.3, 0.03, 0.7
	// The first append is the task description: its length is log-normal, about 3000 tokens.
	firstTokens, firstMu, firstSigma, firstMax = 3000, -0.08, 0.4, 0.6
	appendSigma, genSigma                      = 1.0, 0.8
)

// Generate returns n trajectories with the means of s. Turns and totals are stratified, so that
// small sets have these means too.
func (s Spec) Generate(n int, seed uint64) []Trajectory {
	stream := func(id uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, id)) }
	turns, totals, shares, rounds := stratified(n, stream(streamTurns)), stratified(n, stream(streamTotals)), stream(streamShares), stream(streamRounds)
	sigma := s.TurnsSigma()
	mu := math.Log(s.Turns) - sigma*sigma/2
	near := (s.Total/float64(s.MaxLen) - (1+anyFrom)/2) / ((nearFrom - anyFrom) / 2)
	out := make([]Trajectory, n)
	for i := range out {
		count := max(minTurns, int(math.Round(math.Exp(mu+sigma*normal(turns[i])))))
		total := int(lengthShare(totals[i], near) * float64(s.MaxLen))
		share := s.Gen / (s.Append + s.Gen) * math.Exp(shareMu+shareSigma*shares.NormFloat64())
		gen := int(float64(total) * min(max(share, shareMin), shareMax))
		out[i] = Trajectory{ID: i, Rounds: s.rounds(count, total-gen, gen, rounds)}
	}
	return out
}

// rounds distributes appended and generated tokens over count rounds.
func (s Spec) rounds(count, appended, generated int, rng *rand.Rand) []Round {
	first := int(min(firstMax*float64(appended), firstTokens*math.Exp(firstMu+firstSigma*rng.NormFloat64())))
	weights := make([]float64, count)
	for j := 1; j < count; j++ {
		weights[j] = math.Pow(float64(j+2), -s.Decay) * math.Exp(appendSigma*rng.NormFloat64())
	}
	appends := apportion(appended-first, weights[1:])
	for j := range weights {
		weights[j] = math.Exp(genSigma * rng.NormFloat64())
	}
	gens := apportion(generated, weights)
	out := make([]Round, count)
	for j := range out {
		out[j] = Round{first, gens[j]}
		if j > 0 {
			out[j].Append = appends[j-1]
		}
	}
	return out
}

// lengthShare returns the quantile u of a trajectory's length divided by MaxLen. With probability
// near the distribution is uniform from nearFrom to 1, else uniform from anyFrom to 1.
func lengthShare(u, near float64) float64 {
	if u < 1-near {
		return anyFrom + (1-anyFrom)*u/(1-near)
	}
	return nearFrom + (1-nearFrom)*(u-(1-near))/near
}

// stratified divides (0, 1) into n equal intervals and returns one uniform number from each,
// shuffled.
func stratified(n int, rng *rand.Rand) []float64 {
	out := make([]float64, n)
	for i := range out {
		out[i] = (float64(i) + 0.5) / float64(n)
	}
	rng.Shuffle(n, func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

// normal returns the standard normal quantile.
func normal(u float64) float64 { return math.Sqrt2 * math.Erfinv(2*u-1) }

// apportion divides total by weights into whole parts of at least 1, by largest remainder. The sum
// of the parts is total, or the number of parts if that is greater.
func apportion(total int, weights []float64) []int {
	parts := make([]int, len(weights))
	rest := max(total-len(weights), 0)
	var sum float64
	for _, w := range weights {
		sum += w
	}
	order := make([]int, len(weights))
	remainders := make([]float64, len(weights))
	left := rest
	for i, w := range weights {
		exact := float64(rest) * w / sum
		parts[i], order[i], remainders[i] = 1+int(exact), i, exact-math.Floor(exact)
		left -= int(exact)
	}
	slices.SortFunc(order, func(a, b int) int {
		return cmp.Or(cmp.Compare(remainders[b], remainders[a]), cmp.Compare(a, b))
	})
	for _, i := range order[:min(max(left, 0), len(order))] {
		parts[i]++
	}
	return parts
}
