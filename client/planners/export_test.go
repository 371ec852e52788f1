package planners

// DialEvery is Dial with another mean interval of the questions to the planners.
var DialEvery = dial
