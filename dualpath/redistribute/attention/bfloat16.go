package attention

import "math"

// BFloat16 is the upper half of a float32.
type BFloat16 uint16

// maxBFloat16 is the largest finite value, 3.39e38.
const maxBFloat16 BFloat16 = 0x7f7f

// ToBFloat16 rounds x to the nearest bfloat16 value or, if two are equally near, to the even one. A
// finite x that would round to infinity becomes the largest finite value.
func ToBFloat16(x float32) BFloat16 {
	b := math.Float32bits(x)
	if x != x {
		return BFloat16(b>>16 | 0x40) // a quiet NaN, which truncation does not turn into infinity
	}
	up := BFloat16((b + 0x7fff + b>>16&1) >> 16)
	if up&0x7fff > maxBFloat16 && !math.IsInf(float64(x), 0) {
		return up&0x8000 | maxBFloat16
	}
	return up
}

// Float32 converts exactly.
func (b BFloat16) Float32() float32 { return math.Float32frombits(uint32(b) << 16) }
